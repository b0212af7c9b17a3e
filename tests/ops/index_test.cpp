#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/embedding/embedding.h>
#include <mica/ops/index/index.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace index_test {

using Values = std::vector<double>;

const std::vector<DType> kAll{float64, float32, float16, bfloat16, int64, int32, uint8, boolean};
const std::vector<DType> kSummed{float64, float32, float16, bfloat16, int64, int32};

Tensor indices(std::initializer_list<std::int64_t> values, const Shape& shape, Device device) {
  return from_data<std::int64_t>(values, shape, device);
}

TEST(Gather, AllDtypes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kAll) {
      const Tensor x = reshape(arange(6, int64, device), {2, 3}).to(dtype);
      const Values v = to_vector<double>(x);
      const Tensor columns = indices({2, 0, 0, 1}, {2, 2}, device);
      expect_close(gather(x, 1, columns), Values{v[2], v[0], v[3], v[4]}, 0, 0);
      expect_close(gather(x, -1, columns.to(int32)), Values{v[2], v[0], v[3], v[4]}, 0, 0);
      expect_close(gather(x, 0, indices({1, 0, 1}, {1, 3}, device)), Values{v[3], v[1], v[5]}, 0, 0);
      EXPECT_EQ(gather(x, 1, columns).dtype(), dtype);
      EXPECT_EQ(gather(x, 1, empty({2, 0}, int64, device)).shape(), (Shape{2, 0}));
    }
    // The index is shorter than x along another axis, and longer along the indexed one.
    const Tensor x = reshape(arange(24, int64, device), {2, 3, 4}).to(float32);
    const Tensor index = indices({0, 2, 1, 1, 2, 0, 0, 1}, {1, 4, 2}, device);
    expect_close(gather(x, 1, index), Values{0, 9, 4, 5, 8, 1, 0, 5}, 0, 0);
    expect_close(gather(transpose(x, 1, 2), 2, transpose(index, 1, 2)), Values{0, 4, 8, 0, 9, 5, 1, 5}, 0, 0);
  }
}

TEST(Gather, IndexOutOfRange) {
  for (const Device device : test_devices()) {
    const Tensor bad = indices({0, 3, -1}, {3}, device);
    const Tensor x = ones({3}, float32, device).requires_grad_();
    if (device.is_cpu()) {
      expect_error([&] { gather(x, 0, bad); }, "gather: index 3 is out of range for an axis of length 3");
      expect_error([&] { index_select(x, 0, bad); }, "index_select: index 3 is out of range for an axis of length 3");
      expect_error([&] { scatter_add(x, 0, bad, x); }, "scatter_add: index 3 is out of range");
      expect_error([&] { index_add(x, 0, bad, x); }, "index_add: index 3 is out of range");
      continue;
    }
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      expect_close(gather(ones({3}, dtype, device), 0, bad), Values{1, NAN, NAN}, 0, 0);
    }
    for (const DType dtype : {int64, int32, uint8, boolean}) {
      expect_close(index_select(ones({3}, dtype, device), 0, bad), Values{1, 0, 0}, 0, 0);
    }
    expect_close(scatter_add(x, 0, bad, x), Values{2, 1, 1}, 0, 0);
    expect_close(index_add(x, 0, bad, x), Values{2, 1, 1}, 0, 0);
    sum(gather(x, 0, bad)).backward();
    expect_close(x.grad(), Values{1, 0, 0}, 0, 0);
  }
}

TEST(ScatterAdd, AllDtypes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kSummed) {
      const Tensor x = full({2, 3}, 10, dtype, device);
      const Tensor src = reshape(arange(1, 9, 1, int64, device), {2, 4}).to(dtype);
      const Tensor columns = indices({0, 2, 0, 0, 1, 1, 1, 2}, {2, 4}, device);
      expect_close(scatter_add(x, 1, columns, src), Values{18, 10, 12, 10, 28, 18}, 0, 0);
      // The index is shorter than src and, along the other axis, than x.
      expect_close(scatter_add(x, 1, indices({1, 1}, {1, 2}, device), src), Values{10, 13, 10, 10, 10, 10}, 0, 0);
      expect_close(scatter_add(x, 0, indices({1, 1, 0, 1}, {2, 2}, device), src), Values{15, 10, 10, 11, 18, 10}, 0, 0);
      expect_close(scatter_add(x, 1, empty({2, 0}, int64, device), src), x, 0, 0);
      expect_close(x, full({2, 3}, 10, dtype, device), 0, 0);
    }
  }
}

// src is longer than the index along any axes: its other elements are not used, and get no gradient.
TEST(ScatterAdd, LongerSource) {
  manual_seed(9);
  for (const Device device : test_devices()) {
    for (const Shape& size : {Shape{3, 4, 3}, Shape{2, 4, 2}, Shape{2, 6, 2}, Shape{2, 4, 5}, Shape{4, 5, 3}}) {
      for (int axis = 0; axis < 3; ++axis) {
        SCOPED_TRACE(fmt::format("src {}, axis {}", size, axis));
        const Shape shape{2, 4, 2};
        const Tensor index = randint(0, 2, shape);
        const Tensor x = full({2, 4, 2}, 10, float64, device).requires_grad_();
        const Tensor src =
            reshape(arange(1, static_cast<double>(numel_of(size)) + 1, 1, float64), size).to(device).requires_grad_();
        const std::vector<std::int64_t> at = to_vector<std::int64_t>(index);
        const Values from = to_vector<double>(src);
        Values expected(16, 10), used(from.size());
        for (std::int64_t i = 0; i < 16; ++i) {
          std::array<std::int64_t, 3> place{i / 8, i / 2 % 4, i % 2};
          const auto source = static_cast<std::size_t>((place[0] * size[1] + place[1]) * size[2] + place[2]);
          place[axis] = at[static_cast<std::size_t>(i)];
          expected[static_cast<std::size_t>((place[0] * 4 + place[1]) * 2 + place[2])] += from[source];
          used[source] = 1;
        }
        const Tensor y = scatter_add(x, axis, index.to(device), src);
        expect_close(y, expected, 0, 0);
        y.backward(ones_like(y));
        expect_close(src.grad(), used, 0, 0);
      }
    }
  }
  expect_error([] { scatter_add(ones({2, 9}), 1, zeros({2, 3}, int64), ones({2, 2})); }, "no longer than src and x");
}

// The result is compared with sums in float64. Elements are whole numbers, so that sums are exact.
TEST(ScatterAdd, ManyEqualIndices) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const std::int64_t count : {1, 17, 300, 5000}) {
      const Tensor index = randint(0, count < 100 ? 2 : 40, {3, count, 2});
      const Tensor src = randint(-3, 4, {3, count, 2});
      const std::vector<std::int64_t> at = to_vector<std::int64_t>(index);
      const Values from = to_vector<double>(src);
      Values expected(3 * 40 * 2, 1);
      for (std::size_t i = 0; i < at.size(); ++i) {
        const std::size_t outer = i / static_cast<std::size_t>(2 * count);
        expected[(outer * 40 + static_cast<std::size_t>(at[i])) * 2 + i % 2] += from[i];
      }
      const Tensor x = ones({3, 40, 2}, float32, device);
      expect_close(scatter_add(x, 1, index.to(device), src.to(float32).to(device)), expected, 0, 0);
    }
  }
}

TEST(ScatterAdd, SumsOf16BitsAreRoundedOnce) {
  for (const Device device : test_devices()) {
    const Tensor x = full({1}, 2048, float16, device);
    const Tensor src = ones({3001}, float16, device);
    expect_close(scatter_add(x, 0, zeros({3001}, int64, device), src), Values{5048}, 0, 0);  // 5049, rounded to even
  }
}

// A long sum keeps its small terms, and its bits do not depend on the number of threads.
TEST(ScatterAdd, LongSumsAreAccurate) {
  constexpr std::int64_t kCount = 1'000'000;
  const double total = 0.1f * static_cast<double>(kCount);
  const int before = num_threads();
  for (const Device device : test_devices()) {
    const Tensor index = zeros({kCount}, int64, device), src = full({kCount}, 0.1, float32, device);
    expect_close(scatter_add(zeros({2}, float32, device), 0, index, src), Values{total, 0}, 1e-6, 0);
    expect_close(index_add(ones({1}, float32, device), 0, index, src), Values{total + 1}, 1e-6, 0);
    const Tensor weight = zeros({2, 1}, float32, device).requires_grad_();
    embedding(weight, index).backward(unsqueeze(src, 1));
    expect_close(weight.grad(), Values{total, 0}, 1e-6, 0);
  }
  const Tensor index = randint(0, 5, {3000}), src = randn({3000, 130});
  set_num_threads(1);
  const std::vector<float> one = to_vector<float>(index_add(zeros({7, 130}), 0, index, src));
  set_num_threads(3);
  EXPECT_EQ(to_vector<float>(index_add(zeros({7, 130}), 0, index, src)), one);
  set_num_threads(before);
}

TEST(ScatterAdd, IntegersWrapAround) {
  for (const Device device : test_devices()) {
    const Tensor most = from_data<std::int64_t>({INT64_MAX}, device), one = ones({1}, int64, device);
    EXPECT_EQ(to_vector<std::int64_t>(index_add(most, 0, zeros({1}, int64, device), one))[0], INT64_MIN);
  }
}

TEST(IndexSelect, AllDtypes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kAll) {
      const Tensor x = reshape(arange(12, int64, device), {2, 3, 2}).to(dtype);
      const Values v = to_vector<double>(x);
      const Tensor index = indices({2, 0, 2}, {3}, device);
      expect_close(index_select(x, 1, index),
                   Values{v[4], v[5], v[0], v[1], v[4], v[5], v[10], v[11], v[6], v[7], v[10], v[11]}, 0, 0);
      expect_close(index_select(x, -1, indices({1}, {1}, device)), Values{v[1], v[3], v[5], v[7], v[9], v[11]}, 0, 0);
      expect_close(index_select(transpose(x, 0, 2), 0, indices({1}, {1}, device)),
                   Values{v[1], v[7], v[3], v[9], v[5], v[11]}, 0, 0);
      EXPECT_EQ(index_select(x, 1, empty({0}, int64, device)).shape(), (Shape{2, 0, 2}));
    }
    EXPECT_EQ(index_select(empty({3, 0}, float32, device), 0, indices({1, 1}, {2}, device)).shape(), (Shape{2, 0}));
    // Rows of more than 16 bytes, which the CUDA kernel copies in packs.
    const Tensor wide = reshape(arange(5 * 64, int64, device), {5, 64}).to(bfloat16);
    const Tensor y = index_select(wide, 0, indices({4, 0, 4}, {3}, device));
    expect_close(select(y, 0, 0), select(wide, 0, 4), 0, 0);
    expect_close(select(y, 0, 1), select(wide, 0, 0), 0, 0);
    expect_close(select(y, 0, 2), select(wide, 0, 4), 0, 0);
  }
}

TEST(IndexAdd, AllDtypes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kSummed) {
      const Tensor x = ones({2, 3, 2}, dtype, device);
      const Tensor src = reshape(arange(12, int64, device), {2, 3, 2}).to(dtype);
      expect_close(index_add(x, 1, indices({2, 0, 2}, {3}, device), src), Values{3, 4, 1, 1, 5, 7, 9, 10, 1, 1, 17, 19},
                   0, 0);
      expect_close(index_add(x, 2, indices({1}, {1}, device), slice(src, 2, 0, 1)),
                   Values{1, 1, 1, 3, 1, 5, 1, 7, 1, 9, 1, 11}, 0, 0);
      expect_close(index_add(x, 1, empty({0}, int64, device), empty({2, 0, 2}, dtype, device)), x, 0, 0);
    }
  }
}

TEST(MaskedSelect, AllDtypes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kAll) {
      const Tensor x = reshape(arange(6, int64, device), {2, 3}).to(dtype);
      const Values v = to_vector<double>(x);
      const Tensor mask = indices({1, 0, 1, 0, 0, 1}, {2, 3}, device).to(boolean);
      expect_close(masked_select(x, mask), Values{v[0], v[2], v[5]}, 0, 0);
      expect_close(masked_select(transpose(x, 0, 1), transpose(mask, 0, 1)), Values{v[0], v[2], v[5]}, 0, 0);
      expect_close(masked_select(x, select(mask, 0, 0)), Values{v[0], v[2], v[3], v[5]}, 0, 0);
      expect_close(masked_select(select(x, 0, 1), mask), Values{v[3], v[5], v[5]}, 0, 0);
      EXPECT_EQ(masked_select(x, zeros({2, 3}, boolean, device)).shape(), (Shape{0}));
      EXPECT_EQ(masked_select(x, zeros({}, boolean, device)).shape(), (Shape{0}));
      EXPECT_EQ(masked_select(empty({0, 3}, dtype, device), zeros({3}, boolean, device)).shape(), (Shape{0}));
    }
    manual_seed(2);
    const Tensor x = randn({100003}, float32, device);
    Values expected;
    for (const double value : to_vector<double>(x)) {
      if (value > 0.3F) {
        expected.push_back(value);
      }
    }
    expect_close(masked_select(x, gt(x, 0.3F)), expected, 0, 0);
  }
}

TEST(Index, Gradients) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 2}, float64, device);
    const Tensor index = randint(0, 4, {2, 5, 2}, int64, device);
    const Tensor src = randn({3, 5, 2}, float64, device);
    const Tensor slices = indices({3, 0, 3, 3, 1}, {5}, device);
    const Tensor mask = gt(randn({4, 2}, float32, device), 0);
    const auto check_both = [](const auto& f, const Tensors& inputs) {
      EXPECT_TRUE(autograd::gradcheck(f, inputs));
      EXPECT_TRUE(autograd::gradgradcheck(f, inputs));
    };
    check_both([&](const Tensor& t) { return gather(t * t, 1, index); }, {x});
    check_both([&](const Tensor& t, const Tensor& s) { return scatter_add(t * t, 1, index, s * s); }, {x, src});
    check_both([&](const Tensor& t) { return index_select(t * t, 1, slices); }, {x});
    check_both([&](const Tensor& t, const Tensor& s) { return index_add(t * t, 1, slices, s * s); }, {x, src});
    check_both([&](const Tensor& t) { return masked_select(t * t, mask); }, {x});
  }
}

// Elements with equal indices are always added in the same order.
TEST(Index, SameBitsEachTime) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor src = randn({20000}, float32, device);
    const Tensor index = randint(0, 30, {20000}, int64, device);
    const Tensor x = randn({30}, float32, device);
    const std::vector<float> first = to_vector<float>(scatter_add(x, 0, index, src));
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(to_vector<float>(scatter_add(x, 0, index, src)), first);
    }
  }
}

TEST(Index, Errors) {
  const Tensor x = ones({2, 3});
  const Tensor index = zeros({2, 3}, int64);
  expect_error([&] { gather(x, 2, index); }, "gather: ");
  expect_error([&] { gather(x, 0, x); }, "gather: expected an index of int64 or int32, got float32");
  expect_error([&] { gather(x, 0, zeros({2}, int64)); }, "gather: expected an index of 2 axes, got shape [2]");
  expect_error([&] { gather(x, 1, zeros({3, 3}, int64)); }, "gather: expected an index of at most 2 along axis 0");
  expect_error([&] { scatter_add(x, 0, index, ones({2, 3}, float64)); }, "scatter_add: expected src of float32");
  expect_error([&] { scatter_add(x, 0, index, ones({2, 2})); }, "scatter_add: expected an index no longer than src");
  expect_error([&] { scatter_add(x, 0, index, ones({2})); }, "scatter_add: expected an index and src of 2 axes");
  expect_error([&] { scatter_add(x, 1, zeros({3, 1}, int64), ones({3, 1})); }, "no longer than src and x");
  expect_error([&] { scatter_add(ones({2}, uint8), 0, zeros({2}, int64), ones({2}, uint8)); },
               "scatter_add: dtype uint8 is not supported");
  expect_error([&] { index_select(x, 0, index); }, "index_select: expected an index of one axis, got shape [2, 3]");
  expect_error([&] { index_add(x, 0, zeros({2}, int64), ones({3, 3})); }, "index_add: expected src of shape [2, 3]");
  expect_error([&] { masked_select(x, x); }, "masked_select: expected a mask of bool, got float32");
  expect_error([&] { masked_select(x, ones({4}, boolean)); }, "masked_select: ");
}

}  // namespace index_test
