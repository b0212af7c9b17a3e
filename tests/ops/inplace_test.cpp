#include <gtest/gtest.h>

#include "tests/support.h"
#include <mica/autograd/grad_mode.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace inplace_test {

using Values = std::vector<double>;

TEST(InPlace, Values) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8}) {
      const Tensor x = arange(6, dtype, device);
      const Tensor matrix = view(x, {2, 3});
      const Tensor row = from_data<double>({1.0, 2.0, 3.0}).to(device, dtype);
      EXPECT_TRUE(add_(matrix, row).is_same(matrix));
      expect_close(x, Values{1, 3, 5, 4, 6, 8}, 0, 0);
      add_(matrix, row, 2);
      expect_close(x, Values{3, 7, 11, 6, 10, 14}, 0, 0);
      EXPECT_TRUE(mul_(matrix, row).is_same(matrix));
      expect_close(x, Values{3, 14, 33, 6, 20, 42}, 0, 0);
      EXPECT_TRUE(mul_(x, 2).is_same(x));
      expect_close(x, Values{6, 28, 66, 12, 40, 84}, 0, 0);
      EXPECT_TRUE(copy_(matrix, from_data({7.f, 8.f, 9.f})).is_same(matrix));  // other dtype and device
      expect_close(x, Values{7, 8, 9, 7, 8, 9}, 0, 0);
      EXPECT_TRUE(fill_(select(matrix, 1, 1), 5).defined());
      expect_close(x, Values{7, 5, 9, 7, 5, 9}, 0, 0);
      EXPECT_TRUE(zero_(x).is_same(x));
      expect_close(matrix, Values{0, 0, 0, 0, 0, 0}, 0, 0);
    }
    expect_close(fill_(ones({2}, boolean, device), 0), Values{0, 0}, 0, 0);
  }
}

TEST(InPlace, StridedTargetsAndEmptyOnes) {
  for (const Device device : test_devices()) {
    const Tensor x = arange(6, float32, device);
    add_(transpose(view(x, {2, 3}), 0, 1), from_data({10.f, 20.f}, device));
    expect_close(x, Values{10, 11, 12, 23, 24, 25}, 0, 0);
    fill_(slice(x, 0, 1, 6, 2), -1);
    expect_close(x, Values{10, -1, 12, -1, 24, -1}, 0, 0);
    const Tensor none = empty({0, 3}, float32, device);
    add_(mul_(fill_(none, 1), 2), none);
  }
}

TEST(InPlace, SourcesThatOverlapTheTarget) {
  for (const Device device : test_devices()) {
    const Tensor x = arange(4, float32, device);
    const Tensor square = view(x, {2, 2});
    add_(square, transpose(square, 0, 1));
    expect_close(x, Values{0, 3, 3, 6}, 0, 0);
    copy_(square, transpose(view(copy_(x, arange(4, float32, device)), {2, 2}), 0, 1));
    expect_close(x, Values{0, 2, 1, 3}, 0, 0);
    copy_(x, arange(4, float32, device));
    mul_(slice(x, 0, 1, 4), slice(x, 0, 0, 3));
    expect_close(x, Values{0, 0, 2, 6}, 0, 0);
    add_(x, x);
    expect_close(x, Values{0, 0, 4, 12}, 0, 0);
  }
}

TEST(InPlace, CountsTheVersionOfAllViews) {
  const Tensor x = ones({4});
  const Tensor part = slice(x, 0, 0, 2);
  const std::uint32_t before = x.version();
  fill_(part, 2);
  zero_(part);
  copy_(part, ones({2}));
  add_(part, ones({2}));
  mul_(part, ones({2}));
  mul_(part, 2);
  EXPECT_EQ(x.version(), before + 6);
}

TEST(InPlace, BackwardReportsASavedTensorThatWasChanged) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({2}, float32, device).requires_grad_();
    const Tensor weight = ones({2}, float32, device);
    const Tensor y = x * weight;
    mul_(weight, 2);
    expect_error([&] { y.backward(ones_like(y)); },
                 "Mul: a tensor of shape [2] that it saved for backward was modified in place since, last by mul_");

    const Tensor z = exp(x);  // saves its output
    no_grad([&] { zero_(z); });
    expect_error([&] { z.backward(ones_like(z)); },
                 "Exp: a tensor of shape [2] that it saved for backward was modified in place since, last by zero_");
  }
}

TEST(InPlace, Errors) {
  const Tensor x = ones({2, 3});
  expect_error([&] { add_(x, ones({4})); }, "add_: shapes [2, 3] and [4] do not broadcast");
  expect_error([&] { add_(ones({3}), x); }, "add_: expected a source that broadcasts to [3], got [2, 3]");
  expect_error([&] { copy_(ones({3}), x); }, "copy_: expected a source that broadcasts to [3], got [2, 3]");
  expect_error([&] { mul_(x, ones({3}, float64)); }, "mul_: expected tensors of one dtype, got float32 and float64");
  expect_error([&] { mul_(ones({2}, int64), 0.5); }, "mul_: 0.5 is not representable in int64");
  expect_error([&] { add_(ones({2}, int64), ones({2}, int64), 0.5); }, "add_: 0.5 is not representable in int64");
  expect_error([&] { fill_(ones({2}, uint8), -1); }, "fill_: -1 is not representable in uint8");
  expect_error([&] { fill_(expand(ones({3}), {2, 3}), 0); }, "fill_: expected a target without overlapping elements");
}

TEST(InPlace, IntegersWrapAround) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data<std::int64_t>({INT64_MAX, INT64_MIN}, device);
    add_(x, from_data<std::int64_t>({1, -1}, device));
    EXPECT_EQ(to_vector<std::int64_t>(x), (std::vector<std::int64_t>{INT64_MIN, INT64_MAX}));
    mul_(x, 2);
    EXPECT_EQ(to_vector<std::int64_t>(x), (std::vector<std::int64_t>{0, -2}));
    const Tensor y = from_data<std::int32_t>({INT32_MAX, 3}, device);
    add_(y, y, 3);
    EXPECT_EQ(to_vector<std::int32_t>(y), (std::vector<std::int32_t>{-4, 12}));
    mul_(y, from_data<std::int32_t>({INT32_MIN, 1 << 30}, device));
    EXPECT_EQ(to_vector<std::int32_t>(y), (std::vector<std::int32_t>{0, 0}));
  }
}

TEST(InPlace, UndefinedTargetsAndSources) {
  const Tensor none;
  const Tensor x = ones({2});
  expect_error([&] { fill_(none, 1); }, "fill_: expected a defined target");
  expect_error([&] { zero_(none); }, "zero_: expected a defined target");
  expect_error([&] { copy_(none, x); }, "copy_: expected a defined target");
  expect_error([&] { add_(none, x); }, "add_: expected a defined target");
  expect_error([&] { mul_(none, x); }, "mul_: expected a defined target");
  expect_error([&] { mul_(none, 2); }, "mul_: expected a defined target");
  expect_error([&] { copy_(x, none); }, "undefined");
  expect_error([&] { add_(x, none); }, "undefined");
  expect_error([&] { mul_(x, none); }, "undefined");
  expect_close(x, {1, 1}, 0, 0);
}

}  // namespace inplace_test
