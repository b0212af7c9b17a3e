#include <sstream>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/dispatch.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

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
    EXPECT_EQ(full({}, 2.5, float64, device).item(), 2.5);
    EXPECT_EQ(full_like(zeros({2, 2}, bfloat16, device), 3).device(), device);
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

TEST(Tensor, NoSuchDevice) {
  const std::string text = cuda_available() ? "there is no device cuda:99" : "";
  expect_error([] { zeros({2}, float32, Device::cuda(99)); }, text);
  expect_error([] { empty({0}, float32, Device::cuda(99)); }, "cuda:99");
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
  EXPECT_EQ(to_string(full({}, NAN)), "nan\ntensor of float32 [] on cpu");
  EXPECT_EQ(to_string(zeros({0, 2})), "[]\ntensor of float32 [0, 2] on cpu");
  EXPECT_EQ(to_string(Tensor{}), "tensor(undefined)");
  EXPECT_EQ(to_string(arange(2000)), "[   0,    1,    2, ..., 1997, 1998, 1999]\ntensor of int64 [2000] on cpu");
  std::ostringstream out;
  out << from_data<float>({1e-9f});
  EXPECT_EQ(out.str(), "[1.0000e-09]\ntensor of float32 [1] on cpu");
}

TEST(Half, ConvertsAsIeeeSays) {
  // Every float16 goes to float and back unchanged; halfway cases round to even.
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    Half h;
    h.bits = static_cast<std::uint16_t>(bits);
    const float value = h;
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(Half(value))));
    } else {
      EXPECT_EQ(Half(value).bits, bits);
    }
    BFloat16 b;
    b.bits = static_cast<std::uint16_t>(bits);
    if (std::isnan(static_cast<float>(b))) {
      EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(static_cast<float>(b)))));
    } else {
      EXPECT_EQ(BFloat16(static_cast<float>(b)).bits, bits);
    }
  }
  EXPECT_EQ(static_cast<float>(Half(2049.0f)), 2048.0f);
  EXPECT_EQ(static_cast<float>(Half(2051.0f)), 2052.0f);
  EXPECT_EQ(static_cast<float>(Half(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(static_cast<float>(Half(65520.0f))));
  EXPECT_EQ(static_cast<float>(Half(0x1p-25f)), 0.0f);
  EXPECT_EQ(static_cast<float>(Half(0x1.8p-25f)), 0x1p-24f);
  EXPECT_EQ(static_cast<float>(BFloat16(257.0f)), 256.0f);
  EXPECT_EQ(static_cast<float>(BFloat16(259.0f)), 260.0f);
}

}  // namespace
