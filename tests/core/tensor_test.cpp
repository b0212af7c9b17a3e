#include <cmath>
#include <sstream>
#include <utility>

#include "tests/support.h"
#include <mica/autograd/hooks.h>
#include <mica/core/copy.h>
#include <mica/core/device.h>
#include <mica/core/dispatch.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(FromData, ListsHaveTheDtypeThatPyTorchGivesThem) {
  const Tensor mixed = from_data({1.0, INFINITY, 2});  // double, float, int
  EXPECT_EQ(mixed.dtype(), float32);
  expect_close(mixed, {1, INFINITY, 2}, 0, 0);
  EXPECT_EQ(from_data({1, NAN}, {2, 1}).shape(), (Shape{2, 1}));
  EXPECT_EQ(from_data({1.0, 2.0}).dtype(), float32);
  expect_close(from_data({0.1}), {0.1F}, 0, 0);
  EXPECT_EQ(from_data<double>({1.0, 2.0}).dtype(), float64);
  expect_close(from_data<double>({0.1}), {0.1}, 0, 0);
  EXPECT_EQ(from_data(std::vector<double>{1.0}, {1}).dtype(), float64);
  EXPECT_EQ(from_data({1.0F, INFINITY}).dtype(), float32);
  EXPECT_EQ(from_data({1, 2}, {2}).dtype(), int32);
  EXPECT_EQ(from_data({true, false}).dtype(), boolean);
  EXPECT_EQ(from_data({}).shape(), (Shape{0}));
}

TEST(Shape, NumelStridesAndBroadcast) {
  EXPECT_EQ(numel_of({}), 1);
  EXPECT_EQ(numel_of({3, 0, 5}), 0);
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Strides{12, 4, 1}));
  EXPECT_EQ(broadcast_shapes({3, 1}, {2, 1, 4}, "op"), (Shape{2, 3, 4}));
  EXPECT_EQ(broadcast_shapes({0}, {1}, "op"), (Shape{0}));
  expect_error([] { broadcast_shapes({2}, {3}, "add"); }, "add: shapes [2] and [3] do not broadcast");
  expect_error([] { numel_of({-1}); }, "sizes of at least 0");
  expect_error([] { numel_of({std::int64_t{1} << 40, std::int64_t{1} << 40}); }, "too many elements");
  expect_error([] { Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}; }, "at most 8 axes, got 9");
  EXPECT_EQ(to_string(Shape{2, 3}), "[2, 3]");
}

TEST(Shape, SizesThatOverflow) {
  const std::int64_t most = INT64_MAX;
  EXPECT_EQ(numel_of({0, most, 1}), 0);
  for (const Shape& shape : {Shape{0, most, most}, Shape{most, 0, most}, Shape{most, most, 0}}) {
    expect_error([&] { numel_of(shape); }, "too many elements");
    expect_error([&] { zeros(shape); }, "too many elements");
  }
  expect_error([&] { zeros({most}); }, "too many bytes");
}

TEST(Shape, PositionsOutOfRange) {
  Dims dims{4, 5};
  const Dims none;
  expect_error([&] { dims[2]; }, "axis 2 is out of range for 2 axes");
  expect_error([&] { dims[-1] = 3; }, "axis -1 is out of range for 2 axes");
  expect_error([&] { std::as_const(dims)[2]; }, "axis 2 is out of range for 2 axes");
  expect_error([&] { zeros({2, 3}).shape()[10]; }, "axis 10 is out of range for 2 axes");
  expect_error([&] { zeros({}).shape().back(); }, "axis -1 is out of range for 0 axes");
  expect_error([&] { none.back(); }, "axis -1 is out of range for 0 axes");
  expect_error([&] { Dims{}.pop_back(); }, "axis -1 is out of range for 0 axes");
  expect_error([&] { dims.erase(5); }, "axis 5 is out of range for 2 axes");
  expect_error([&] { dims.erase(-1); }, "axis -1 is out of range for 2 axes");
  expect_error([&] { dims.insert(3, 1); }, "cannot insert at position 3 of 2 axes");
  expect_error([&] { dims.insert(-1, 1); }, "cannot insert at position -1 of 2 axes");
  expect_error([&] { dims.slice(1, 3); }, "axes 1 to 3 are out of range for 2 axes");
  expect_error([&] { dims.slice(2, 1); }, "axes 2 to 1 are out of range for 2 axes");
  expect_error([&] { dims.slice(-1, 1); }, "axes -1 to 1 are out of range for 2 axes");
  EXPECT_EQ(dims, (Dims{4, 5}));

  dims.insert(2, 6);
  dims.insert(0, 3);
  EXPECT_EQ(dims, (Dims{3, 4, 5, 6}));
  dims.erase(1);
  dims.pop_back();
  EXPECT_EQ(dims, (Dims{3, 5}));
  EXPECT_EQ(dims.slice(2), Dims{});
  expect_error([] { normalize_axis(0, 0, "softmax"); },
               "softmax: expected a tensor with axes, got a scalar and axis 0");
}

TEST(Tensor, CreationOnEveryDeviceAndDtype) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8, boolean}) {
      EXPECT_EQ(zeros({2, 3}, dtype, device).dtype(), dtype);
      expect_close(zeros({2}, dtype, device), {0, 0}, 0, 0);
      expect_close(ones({2}, dtype, device), {1, 1}, 0, 0);
      expect_close(full({2}, 1, dtype, device), {1, 1}, 0, 0);
      EXPECT_EQ(empty({2, 0}, dtype, device).numel(), 0);
    }
    expect_close(arange(2, 5, 1, int32, device), {2, 3, 4}, 0, 0);
    expect_close(arange(1, 0, -0.25, float64, device), {1, 0.75, 0.5, 0.25}, 0, 0);
    EXPECT_EQ(arange(3, 3, 1).numel(), 0);
    EXPECT_EQ(to_vector<float>(arange(0.1, 5, 0.3, float32, device)), to_vector<float>(arange(0.1, 5, 0.3, float32)));
    EXPECT_EQ(full({}, 2.5, float64, device).item(), 2.5);
    EXPECT_EQ(full_like(zeros({2, 2}, bfloat16, device), 3).device(), device);
  }
}

TEST(Tensor, NumbersThatIntegersCannotHold) {
  for (const Device device : test_devices()) {
    expect_error([&] { full({2}, 3e9, int32, device); }, "full: 3000000000 is not representable in int32");
    expect_error([&] { full({2}, NAN, int64, device); }, "full: nan is not representable in int64");
    expect_error([&] { full({2}, INFINITY, int64, device); }, "full: inf is not representable in int64");
    expect_error([&] { full({2}, 0x1p63, int64, device); }, "is not representable in int64");
    expect_error([&] { full({1}, -1, uint8, device); }, "full: -1 is not representable in uint8");
    expect_error([&] { full({1}, 256, uint8, device); }, "full: 256 is not representable in uint8");
    expect_error([&] { full({1}, 2, boolean, device); }, "full: 2 is not representable in bool");
    expect_error([&] { full({1}, 0.5, int32, device); }, "full: 0.5 is not representable in int32");
    expect_error([&] { full_like(zeros({2}, uint8, device), -1); }, "full: -1 is not representable in uint8");
    expect_close(full({1}, -0x1p63, int64, device), {-0x1p63}, 0, 0);
    EXPECT_TRUE(std::signbit(full({1}, -0.0, float32, device).item()));

    expect_error([&] { arange(0, 5, 1, boolean, device); }, "arange: 4 is not representable in bool");
    expect_error([&] { arange(0, 300, 1, uint8, device); }, "arange: 299 is not representable in uint8");
    expect_error([&] { arange(0, 600, 200, uint8, device); }, "arange: 400 is not representable in uint8");
    expect_close(arange(0, 300, 100, uint8, device), {0, 100, 200}, 0, 0);
    expect_error([&] { arange(-1, 3, 1, uint8, device); }, "arange: -1 is not representable in uint8");
    expect_error([&] { arange(0, 1, 0.25, int32, device); }, "is not representable in int");
    expect_error([&] { arange(0.5, 3, 1, int64, device); }, "arange: 0.5 is not representable in int64");
    expect_error([&] { arange(0x1p31, 0x1p31 + 2, 1, int32, device); }, "is not representable in int32");
    expect_close(arange(0, 2, 1, boolean, device), {0, 1}, 0, 0);
    expect_close(arange(0, 2.5, 1, int32, device), {0, 1, 2}, 0, 0);
    EXPECT_EQ(arange(5, 0, 1, uint8, device).numel(), 0);
    // Beyond 2^53 doubles skip every other integer.
    EXPECT_EQ(to_vector<std::int64_t>(arange(0x1p53, 0x1p53 + 4, 1, int64, device)),
              (std::vector<std::int64_t>{1LL << 53, (1LL << 53) + 1, (1LL << 53) + 2, (1LL << 53) + 3}));
  }
}

TEST(Tensor, FromBlobSharesMemory) {
  std::vector<float> values{1, 2, 3, 4};
  {
    const Tensor x = from_blob(values.data(), {2, 2}, float32);
    fill_data(as_strided(x, {2}, {1}, 2), 7);
  }
  EXPECT_EQ(values, (std::vector<float>{1, 2, 7, 7}));
  expect_error([] { from_blob(nullptr, {1}, float32); }, "got a null pointer");
  expect_error([&] { from_blob(values.data(), {INT64_MAX}, float32); },
               "from_blob: [9223372036854775807] of float32 has");
  // The largest size that offsets can represent, and one element more.
  EXPECT_EQ(from_blob(values.data(), {INT64_MAX / 4}, float32).numel(), INT64_MAX / 4);
  expect_error([&] { from_blob(values.data(), {INT64_MAX / 4 + 1}, float32); }, "has too many bytes");
  expect_error([&] { from_blob(values.data(), {1}, static_cast<DType>(77)); },
               "from_blob: expected a dtype, got number 77");
  expect_error([] { empty({1}, static_cast<DType>(77)); }, "empty: expected a dtype, got number 77");
  expect_error([] { zeros({1}).to(static_cast<DType>(77)); }, "expected a dtype, got number 77");
}

TEST(Tensor, LargeIntegersAreExact) {
  const std::int64_t large = (std::int64_t{1} << 60) + 1;
  EXPECT_EQ(to_vector<std::int64_t>(from_data<std::int64_t>({large}))[0], large);
}

TEST(Tensor, Errors) {
  const Tensor x = zeros({2, 3});
  expect_error([&] { x.item(); }, "item: expected a tensor of one element, got shape [2, 3]");
  expect_error([&] { x.data<double>(); }, "asked for float64 elements of a tensor of float32");
  expect_error([&] { x.size(2); }, "size: expected an axis in [-2, 2), got 2");
  expect_error([] { Tensor{}.shape(); }, "undefined");
  expect_error([] { from_data<float>({1, 2, 3}, {2, 2}); }, "expected 4 values for shape [2, 2], got 3");
  expect_error([] { arange(0, 1, 0); }, "a step that is not 0");
  expect_error([&] { copy_into(x, zeros({3, 2})); }, "copy: expected shape [2, 3], got [3, 2]");
  expect_error([] { rand({2}, int64); }, "rand: expected a floating dtype, got int64");
}

TEST(Tensor, UndefinedTensorsAreRefused) {
  const Tensor none;
  const std::string text = "expected a defined tensor";
  expect_error([&] { none.detach(); }, text);
  expect_error([&] { ones({2}).requires_grad_().grad().detach(); }, text);
  expect_error([&] { as_strided(none, {2}, {1}, 0); }, text);
  expect_error([&] { broadcast_view(none, {2}); }, text);
  expect_error([&] { none.item(); }, text);
  expect_error([&] { none.to(float64); }, text);
  expect_error([&] { none.to(Device::cpu()); }, text);
  expect_error([&] { none.version(); }, text);
  expect_error([&] { none.bump_version(); }, text);
  expect_error([&] { none.is_inference(); }, text);
  expect_error([&] { none.requires_grad_(); }, text);
  expect_error([&] { none.set_grad(ones({2})); }, text);
  expect_error([&] { none.set_data(ones({2})); }, text);
  expect_error([&] { ones({2}).set_data(none); }, text);
  expect_error([&] { none.backward(); }, "undefined");
  expect_error([&] { none.register_hook([](const Tensor& x) { return x; }); }, text);
  expect_error([&] { none.register_post_accumulate_grad_hook([](const Tensor&) {}); }, text);
  expect_error([&] { copy_into(none, ones({2})); }, text);
  expect_error([&] { copy_into(ones({2}), none); }, text);
  expect_error([&] { fill_data(none, 1); }, text);
  expect_error([&] { contiguous_data(none); }, text);
  expect_error([&] { to_vector<float>(none); }, text);
  expect_error([&] { zeros_like(none); }, text);
  EXPECT_FALSE(none.requires_grad());
  EXPECT_FALSE(none.grad().defined());
  EXPECT_EQ(to_string(none), "tensor(undefined)");
}

TEST(Tensor, StridesForEachAxis) {
  expect_error([] { as_strided(ones({4}), {2, 2}, {1}, 0); }, "shape [2, 2] and strides [1]");
  expect_error([] { as_strided(ones({4}), {4}, {1, 1}, 0); }, "shape [4] and strides [1, 1]");
}

TEST(Tensor, NoSuchDevice) {
  constexpr const char* kText = "there is no device cuda:99";
  expect_error([] { zeros({2}, float32, Device::cuda(99)); }, kText);
  expect_error([] { empty({0}, float32, Device::cuda(99)); }, "cuda:99");
  expect_error([] { device_name(Device::cuda(99)); }, kText);
  expect_error([] { DeviceGuard guard(Device::cuda(99)); }, kText);
  expect_error([] { synchronize(Device::cuda(99)); }, kText);
  EXPECT_EQ(device_name(Device::cpu()), "cpu");
  synchronize(Device::cpu());
}

TEST(Tensor, OutOfMemoryIsRecoverable) {
  for (const Device device : test_devices()) {
    try {
      empty({std::int64_t{1} << 50}, float32, device);
      ADD_FAILURE() << "4 PiB were allocated";
    } catch (const OutOfMemory& error) {
      EXPECT_NE(std::string(error.what()).find("asked for 4503599627370496 bytes"), std::string::npos) << error.what();
    }
    expect_close(ones({3}, float32, device), {1, 1, 1}, 0, 0);
  }
}

TEST(Tensor, CopiesAcrossDevicesAndLayouts) {
  for (const Device device : test_devices()) {
    const Tensor x = arange(6, float32, device);
    const Tensor columns = as_strided(x, {3, 2}, {1, 3}, 0);  // transposed
    expect_close(columns.to(Device::cpu()), {0, 3, 1, 4, 2, 5}, 0, 0);
    expect_close(contiguous_data(columns), {0, 3, 1, 4, 2, 5}, 0, 0);
    const Tensor target = zeros({6}, float64);
    copy_into(as_strided(target, {3, 2}, {1, 3}, 0), columns);
    expect_close(target, {0, 1, 2, 3, 4, 5}, 0, 0);
    const Tensor back = zeros({6}, float32, device);
    copy_into(as_strided(back, {3, 2}, {1, 3}, 0), columns.to(Device::cpu(), float64));
    expect_close(back, {0, 1, 2, 3, 4, 5}, 0, 0);
    EXPECT_TRUE(x.to(device).is_same(x));
  }
}

TEST(Tensor, ToIsDifferentiable) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({2}, float64).requires_grad_();
    const Tensor y = x.to(device, float32);
    EXPECT_TRUE(y.requires_grad());
    y.backward(from_data<float>({3, 4}, {2}, device));
    EXPECT_EQ(x.grad().dtype(), float64);
    expect_close(x.grad(), {3, 4}, 0, 0);
  }
  EXPECT_FALSE(ones({1}).requires_grad_().to(int64).requires_grad());
}

TEST(Tensor, ItemOfAView) {
  const Tensor x = from_data<float>({1, 2, 3});
  EXPECT_EQ(as_strided(x, {1}, {1}, 2).item(), 3);
  EXPECT_EQ(as_strided(x, {1, 1}, {7, 5}, 1).item(), 2);
}

TEST(Tensor, Printing) {
  EXPECT_EQ(to_string(from_data<float>({1, 2, 3, 4}, {2, 2})),
            "[[1., 2.],\n [3., 4.]]\ntensor of float32 [2, 2] on cpu");
  EXPECT_EQ(to_string(from_data<double>({0.5, -1}).requires_grad_()),
            "[ 0.5000, -1.0000]\ntensor of float64 [2] on cpu, requires grad");
  EXPECT_EQ(to_string(from_data<std::int64_t>({-1, 10})), "[-1, 10]\ntensor of int64 [2] on cpu");
  EXPECT_EQ(to_string(ones({1}, boolean)), "[true]\ntensor of bool [1] on cpu");
  constexpr std::int64_t kOdd = (std::int64_t{1} << 53) + 1;  // a double would round it
  EXPECT_EQ(to_string(from_data<std::int64_t>({kOdd, INT64_MAX, INT64_MIN})),
            "[    9007199254740993,  9223372036854775807, -9223372036854775808]\ntensor of int64 [3] on cpu");
  EXPECT_EQ(to_string(full({1, 1001}, kOdd - 1, int64)).find("9007199254740992"), 2U);
  EXPECT_EQ(from_data<std::int64_t>({kOdd - 1}).item(), 0x1p53);
  EXPECT_EQ(from_data<std::int64_t>({INT64_MIN}).item(), -0x1p63);
  for (const std::int64_t value : {kOdd, -kOdd, INT64_MAX}) {
    expect_error([&] { from_data<std::int64_t>({value}).item(); }, fmt::format("got {}; read it by to_vector", value));
  }
  EXPECT_EQ(to_string(full({}, NAN)), "nan\ntensor of float32 [] on cpu");
  EXPECT_EQ(to_string(zeros({0, 2})), "[]\ntensor of float32 [0, 2] on cpu");
  EXPECT_EQ(to_string(Tensor{}), "tensor(undefined)");
  EXPECT_EQ(to_string(arange(2000)), "[   0,    1,    2, ..., 1997, 1998, 1999]\ntensor of int64 [2000] on cpu");
  // 1000 elements are printed completely; larger tensors show three at each end of axes with more than six.
  EXPECT_EQ(to_string(zeros({1000}, uint8)).find("..."), std::string::npos);
  EXPECT_NE(to_string(zeros({1001}, uint8)).find("[0, 0, 0, ..., 0, 0, 0]"), std::string::npos);
  const std::string long_rows = to_string(zeros({167, 6}, uint8));
  EXPECT_EQ(long_rows,
            "[[0, 0, 0, 0, 0, 0],\n [0, 0, 0, 0, 0, 0],\n [0, 0, 0, 0, 0, 0],\n ...,\n"
            " [0, 0, 0, 0, 0, 0],\n [0, 0, 0, 0, 0, 0],\n [0, 0, 0, 0, 0, 0]]\ntensor of uint8 [167, 6] on cpu");
  EXPECT_NE(to_string(zeros({7, 167}, uint8)).find("...,\n"), std::string::npos);
  std::ostringstream out;
  out << from_data<float>({1e-9f});
  EXPECT_EQ(out.str(), "[1.0000e-09]\ntensor of float32 [1] on cpu");
}

TEST(Float16, ConversionsFollowIeee754) {
  // Every float16 goes to float and back unchanged; halfway cases round to even.
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    Float16 h;
    h.bits = static_cast<std::uint16_t>(bits);
    const float value = h;
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(Float16(value))));
    } else {
      EXPECT_EQ(Float16(value).bits, bits);
    }
    BFloat16 b;
    b.bits = static_cast<std::uint16_t>(bits);
    if (std::isnan(static_cast<float>(b))) {
      EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(static_cast<float>(b)))));
    } else {
      EXPECT_EQ(BFloat16(static_cast<float>(b)).bits, bits);
    }
  }
  EXPECT_EQ(static_cast<float>(Float16(2049.0f)), 2048.0f);
  EXPECT_EQ(static_cast<float>(Float16(2051.0f)), 2052.0f);
  EXPECT_EQ(static_cast<float>(Float16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(static_cast<float>(Float16(65520.0f))));
  EXPECT_EQ(static_cast<float>(Float16(0x1p-25f)), 0.0f);
  EXPECT_EQ(static_cast<float>(Float16(0x1.8p-25f)), 0x1p-24f);
  EXPECT_EQ(static_cast<float>(BFloat16(257.0f)), 256.0f);
  EXPECT_EQ(static_cast<float>(BFloat16(259.0f)), 260.0f);
}

// Compares the vectorized conversions with those of single elements.
TEST(Float16, ManyAtOnce) {
  for (const std::int64_t n : {1, 7, 8, 9, 37}) {
    std::vector<float> values(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.1f * static_cast<float>(i) - 1.7f;
    }
    const auto check_one = [&]<class T>(T, DType dtype) {
      const Tensor narrow = from_data<float>(values, {n}).to(dtype);
      const std::vector<float> back = to_vector<float>(narrow), wide = to_vector<float>(narrow.to(float32));
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(back[i], static_cast<float>(T(values[i]))) << i << " of " << n << " in " << name_of(dtype);
        EXPECT_EQ(wide[i], back[i]) << i << " of " << n << " in " << name_of(dtype);
      }
    };
    check_one(Float16(0.0f), float16);
    check_one(BFloat16(0.0f), bfloat16);
  }
}

TEST(Tensor, EmptyTensorsAreContiguous) {
  const Tensor x = as_strided(zeros({4, 3}), {0, 3}, {1, 7}, 0);
  EXPECT_TRUE(x.is_contiguous());
  EXPECT_FALSE(as_strided(zeros({4, 3}), {2, 2}, {1, 3}, 0).is_contiguous());
}

}  // namespace
