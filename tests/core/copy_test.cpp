#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

constexpr DType kDtypes[] = {float64, float32, float16, bfloat16, int64, int32, uint8, boolean};

// Layouts of one shape: row-major, shifted by one element, transposed with gaps, and (as a source) broadcast.
Tensor laid_out(int layout, const Shape& shape, DType dtype, Device device) {
  const std::int64_t n = numel_of(shape);
  switch (layout) {
    case 0: return empty(shape, dtype, device);
    case 1: return as_strided(empty({n + 1}, dtype, device), shape, contiguous_strides(shape), 1);
    default: {
      Strides strides = shape;
      std::int64_t step = 2;
      for (int axis = 0; axis < shape.size(); ++axis) {
        strides[axis] = step;
        step *= shape[axis];
      }
      return as_strided(empty({step + 1}, dtype, device), shape, strides, 1);
    }
  }
}

TEST(Copy, AllDtypesAndLayouts) {
  for (const Device device : test_devices()) {
    for (const Shape& shape : {Shape{}, Shape{1}, Shape{3, 5}, Shape{4, 8}, Shape{2, 3, 257}}) {
      const std::int64_t n = numel_of(shape);
      std::vector<double> values;
      for (std::int64_t i = 0; i < n; ++i) {
        values.push_back(static_cast<double>(i % 101));  // exact in every dtype but bool
      }
      std::vector<double> truth;
      for (const double value : values) {
        truth.push_back(value != 0);
      }
      const Tensor start = from_data(values, shape);
      for (const DType from : kDtypes) {
        for (const DType to : kDtypes) {
          for (int layout = 0; layout < 9; ++layout) {
            const Tensor src = laid_out(layout / 3, shape, from, device);
            const Tensor dst = laid_out(layout % 3, shape, to, device);
            copy_into(src, start);
            copy_into(dst, src);
            expect_close(dst, from == boolean || to == boolean ? truth : values, 0, 0,
                         fmt::format("{} to {}, layout {}, {}", from, to, layout, shape));
          }
        }
      }
    }
  }
}

TEST(Copy, BroadcastSources) {
  for (const Device device : test_devices()) {
    for (const DType to : {float32, float16, int64}) {
      const Tensor row = from_data({1.f, 2.f, 3.f, 4.f}, device);
      const Tensor column = from_data({1.f, 2.f}, {2, 1}, device);
      const Tensor dst = empty({2, 4}, to, device);
      copy_into(dst, broadcast_view(row, {2, 4}));
      expect_close(dst, std::vector<double>{1, 2, 3, 4, 1, 2, 3, 4}, 0, 0);
      copy_into(dst, broadcast_view(column, {2, 4}));
      expect_close(dst, std::vector<double>{1, 1, 1, 1, 2, 2, 2, 2}, 0, 0);
    }
  }
}

TEST(Copy, RoundsToNearestEven) {
  for (const Device device : test_devices()) {
    const std::vector<double> values{1 + 0x1p-11, 1 + 3 * 0x1p-11, 65519, 65520, 0x1p-25, 0x1.8p-25, -0.0};
    const std::vector<double> expected{1, 1 + 0x1p-9, 65504, INFINITY, 0, 0x1p-24, -0.0};
    expect_close(from_data(values, {7}, device).to(float32).to(float16), expected, 0, 0);
    expect_close(from_data<double>({1 + 0x1p-8, 1 + 3 * 0x1p-8, 3.4e38, 3.39e38}, device).to(float32).to(bfloat16),
                 std::vector<double>{1, 1 + 0x1p-6, INFINITY, 0x1.fep127}, 0, 0);
    expect_close(from_data({NAN, INFINITY, -INFINITY}, device).to(bfloat16).to(float16).to(float64),
                 std::vector<double>{NAN, INFINITY, -INFINITY}, 0, 0);
  }
}

TEST(Copy, IntegersKeepEveryBit) {
  for (const Device device : test_devices()) {
    const std::vector<std::int64_t> values{INT64_MAX, INT64_MIN, (std::int64_t{1} << 53) + 1, -1, 0};
    EXPECT_EQ(to_vector<std::int64_t>(from_data(values, {5}, device)), values);
    const std::vector<double> fractions{2.9, -2.9, 0.5};
    expect_close(from_data(fractions, {3}, device).to(int32), std::vector<double>{2, -2, 0}, 0, 0);
    expect_close(from_data(fractions, {3}, device).to(boolean), std::vector<double>{1, 1, 1}, 0, 0);
  }
}

TEST(Copy, AcrossDevices) {
  for (const Device device : test_devices()) {
    const Tensor host = from_data({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}, {2, 3});
    const Tensor dst = laid_out(2, {2, 3}, float16, device);
    copy_into(dst, host);
    const Tensor back = laid_out(2, {2, 3}, float64, Device::cpu());
    copy_into(back, dst);
    expect_close(back, host, 0, 0);
  }
}

TEST(Fill, AllDtypesAndLayouts) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kDtypes) {
      for (int layout = 0; layout < 3; ++layout) {
        for (const double value : {1.0, 0.0}) {
          const Tensor x = laid_out(layout, {3, 5, 7}, dtype, device);
          fill_data(x, value);
          expect_close(x, std::vector<double>(105, value), 0, 0);
        }
      }
    }
  }
}

TEST(AddInto, AllDtypesAndLayouts) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8}) {
      for (int layout = 0; layout < 9; ++layout) {
        const Tensor x = laid_out(layout / 3, {3, 5, 8}, dtype, device);
        const Tensor y = laid_out(layout % 3, {3, 5, 8}, dtype, device);
        fill_data(x, 3);
        fill_data(y, 4);
        add_into(x, y);
        expect_close(x, std::vector<double>(120, 7), 0, 0);
      }
    }
  }
}

// Large enough for several threads.
TEST(Copy, ByThreads) {
  const int threads = num_threads();
  set_num_threads(4);
  std::vector<float> values(std::size_t{1} << 20);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i);
  }
  const Tensor x = from_data<float>(values, {1024, 1024});
  const Tensor same = empty({1024, 1024}), wide = empty({1024, 1024}, float64), turned = empty({1024, 1024});
  copy_into(same, x);
  copy_into(wide, x);
  copy_into(turned, transpose(x, 0, 1));
  set_num_threads(threads);
  EXPECT_EQ(to_vector<float>(same), values);
  EXPECT_EQ(to_vector<float>(wide), values);
  const std::vector<float> columns = to_vector<float>(turned);
  for (std::size_t row = 0; row < 1024; ++row) {
    for (std::size_t column = 0; column < 1024; column += 31) {
      ASSERT_EQ(columns[row * 1024 + column], values[column * 1024 + row]);
    }
  }
}

TEST(Copy, ManyTensorsAtOnce) {
  for (const Device device : test_devices()) {
    Tensors to, from;
    for (const DType dtype : kDtypes) {
      for (const std::int64_t n : {0, 1, 7, 8192, 8200, 100'003}) {
        for (int layout = 0; layout < 3; ++layout) {
          const DType wide = layout == 2 && size_of(dtype) == 2 ? float32 : dtype;
          from.push_back(laid_out(layout, {n}, dtype, device));
          to.push_back(laid_out(layout == 2 ? 1 : layout, {n}, wide, device));
          copy_into(from.back(), randint(0, 2, {n}, int32).to(device));
          fill_data(to.back(), 1);
        }
      }
    }
    for (int i = 0; i < 300; ++i) {  // more than one launch takes
      from.push_back(randint(0, 200, {i % 5 * 1000}, int32).to(device, i % 2 == 0 ? bfloat16 : float32));
      to.push_back(empty(from.back().shape(), float32, device));
    }
    copy_all_into(to, from);
    for (std::size_t i = 0; i < to.size(); ++i) {
      ASSERT_EQ(to_vector<double>(to[i]), to_vector<double>(from[i]))
          << i << ": " << name_of(from[i].dtype()) << " to " << name_of(to[i].dtype()) << " on " << to_string(device);
    }
  }
  EXPECT_THROW(copy_all_into({zeros({1})}, {}), Error);
  EXPECT_THROW(copy_all_into({zeros({1})}, {zeros({2})}), Error);
}

TEST(AddInto, OneElementAndNone) {
  for (const Device device : test_devices()) {
    const Tensor one = full({1}, 2, float32, device);
    add_into(one, full({1}, 3, float32, device));
    EXPECT_EQ(one.item(), 5);
    add_into(empty({0, 2}, float32, device), empty({0, 2}, float32, device));
  }
}

}  // namespace
