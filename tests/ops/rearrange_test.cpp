#include <gtest/gtest.h>

#include <vector>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/rearrange/rearrange.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace rearrange_test {

using Values = std::vector<double>;

TEST(Rearrange, Roll) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, int64, uint8}) {
      const Tensor x = reshape(arange(6, int64, device).to(dtype), {2, 3});
      expect_close(roll(x, 1, 1), Values{2, 0, 1, 5, 3, 4}, 0, 0);
      expect_close(roll(x, -4, 1), Values{1, 2, 0, 4, 5, 3}, 0, 0);
      expect_close(roll(x, 5, -2), Values{3, 4, 5, 0, 1, 2}, 0, 0);
      expect_close(roll(x, 3, 1), Values{0, 1, 2, 3, 4, 5}, 0, 0);
      EXPECT_EQ(roll(empty({2, 0}, dtype, device), 1, 1).shape(), (Shape{2, 0}));
    }
    EXPECT_FALSE(roll(ones({3}, float32, device), 3, 0).requires_grad());
    const auto f = [](const Tensor& t) { return roll(t * t, 2, 0); };
    const Tensor x = randn({5, 2}, float64, device);
    EXPECT_TRUE(autograd::gradcheck(f, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
  }
}

TEST(Rearrange, Repeat) {
  for (const Device device : test_devices()) {
    const Tensor x = reshape(arange(4, int64, device), {2, 2});
    expect_close(repeat(x, {1, 2}), Values{0, 1, 0, 1, 2, 3, 2, 3}, 0, 0);
    expect_close(repeat(x, {2, 1}), Values{0, 1, 2, 3, 0, 1, 2, 3}, 0, 0);
    const Tensor y = repeat(x, {3, 2, 2});
    EXPECT_EQ(y.shape(), (Shape{3, 4, 4}));
    expect_close(select(y, 0, 2), Values{0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3}, 0, 0);
    EXPECT_EQ(repeat(x, {2, 0}).shape(), (Shape{4, 0}));
    EXPECT_EQ(repeat(full({}, 7, float32, device), {2}).shape(), (Shape{2}));
    const auto f = [](const Tensor& a) { return repeat(a * a, {2, 1, 3}); };
    const Tensor a = randn({2, 3}, float64, device);
    EXPECT_TRUE(autograd::gradcheck(f, {a}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {a}));
  }
}

TEST(Rearrange, Pad) {
  for (const Device device : test_devices()) {
    const Tensor x = reshape(arange(4, int64, device).to(float32), {2, 2});
    expect_close(pad(x, 1, 1, 0), Values{0, 0, 1, 0, 2, 3}, 0, 0);
    expect_close(pad(x, -2, 0, 1, 9), Values{0, 1, 2, 3, 9, 9}, 0, 0);
    expect_close(pad(x, 0, 0, 0), Values{0, 1, 2, 3}, 0, 0);
    const auto f = [](const Tensor& a) { return pad(a * a, 1, 2, 1, 5); };
    const Tensor a = randn({2, 3}, float64, device);
    EXPECT_TRUE(autograd::gradcheck(f, {a}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {a}));
  }
}

TEST(Rearrange, OneHot) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {int64, int32}) {
      const Tensor indices = from_data<std::int64_t>({2, 0, 1, 2}, {2, 2}).to(device, dtype);
      const Tensor y = one_hot(indices, 3);
      EXPECT_EQ(y.shape(), (Shape{2, 2, 3}));
      EXPECT_EQ(y.dtype(), int64);
      expect_close(y, Values{0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1}, 0, 0);
      EXPECT_EQ(one_hot(indices, 3, float16).dtype(), float16);
    }
    EXPECT_EQ(one_hot(empty({0}, int64, device), 4).shape(), (Shape{0, 4}));
    const Tensor bad = from_data<std::int64_t>({0, 3, -1}).to(device);
    if (device.is_cuda()) {
      expect_close(one_hot(bad, 3), Values{1, 0, 0, 0, 0, 0, 0, 0, 0}, 0, 0);
    } else {
      expect_error([&] { one_hot(bad, 3); }, "one_hot: expected indices in [0, 3), got -1");
      expect_error([&] { one_hot(bad + 1, 3); }, "one_hot: expected indices in [0, 3), got 4");
    }
  }
}

TEST(Rearrange, Errors) {
  const Tensor x = ones({2, 3});
  expect_error([&] { roll(x, 1, 2); }, "roll: ");
  expect_error([&] { repeat(x, {2}); }, "repeat: expected a count for each of 2 axes");
  expect_error([&] { repeat(x, {2, -1}); }, "repeat: expected counts that are not negative");
  expect_error([&] { repeat(x, {1, INT64_MAX}); }, "repeat: ");
  expect_error([&] { pad(x, 0, -1, 0); }, "pad: expected numbers of elements that are not negative, got -1 and 0");
  expect_error([&] { pad(ones({2}, uint8), 0, 1, 0, 300); }, "pad: 300 is not representable in uint8");
  expect_error([&] { one_hot(x, 3); }, "one_hot: expected indices of int64 or int32, got float32");
  expect_error([&] { one_hot(from_data<std::int64_t>({(std::int64_t{1} << 53) + 1}), 3); }, "got 9007199254740993");
  expect_error([&] { one_hot(ones({2}, int64), 0); }, "one_hot: expected at least one class, got 0");
  expect_error([&] { one_hot(ones({2}, int64), INT64_MAX); }, "one_hot: expected at most 9007199254740992 classes");
}

TEST(Rearrange, Flip) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16, int64, uint8, boolean}) {
      const Tensor x = reshape(arange(6, int64, device), {2, 3}).to(dtype);
      const Values v = to_vector<double>(x);
      expect_close(flip(x, {1}), Values{v[2], v[1], v[0], v[5], v[4], v[3]}, 0, 0);
      expect_close(flip(x, {-2}), Values{v[3], v[4], v[5], v[0], v[1], v[2]}, 0, 0);
      expect_close(flip(x), Values{v[5], v[4], v[3], v[2], v[1], v[0]}, 0, 0);
      expect_close(flip(transpose(x, 0, 1), {0}), Values{v[2], v[5], v[1], v[4], v[0], v[3]}, 0, 0);
      EXPECT_EQ(flip(empty({2, 0}, dtype, device)).shape(), (Shape{2, 0}));
    }
    const Tensor one = full({}, 3, float32, device);
    EXPECT_EQ(flip(one).item(), 3);
    EXPECT_FALSE(flip(one).is_same(one));
    const auto f = [](const Tensor& t) { return flip(t * t, {0, 2}); };
    const Tensor x = randn({3, 2, 4}, float64, device);
    EXPECT_TRUE(autograd::gradcheck(f, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
  }
  expect_error([] { flip(ones({2, 3}), {2}); }, "flip: ");
  expect_error([] { flip(ones({2, 3}), {1, -1}); }, "flip: expected each axis once");
}

}  // namespace rearrange_test
