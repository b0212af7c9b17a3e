#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "image_cases.h"
#include <mica/ops/pool/pool.h>

using namespace mica;
using namespace mica::testing_support;

namespace pool_test {

using Values = std::vector<double>;

const std::vector<ImageCase>& cases() {
  static const std::vector<ImageCase> all{
      {"max 1d", {2, 3, 11}, [](const Tensor& x) { return max_pool1d(x, 3, {.stride = 2, .padding = 1}); }},
      {"max 1d without N", {3, 7}, [](const Tensor& x) { return max_pool1d(x, 2); }},
      {"max resnet", {2, 16, 9, 8}, [](const Tensor& x) { return max_pool2d(x, 3, {.stride = 2, .padding = 1}); }},
      {"max dilated, ceil",
       {1, 5, 9, 10},
       [](const Tensor& x) {
         return max_pool2d(x, {2, 3},
                           {.stride = PerAxis{3, 2}, .padding = {0, 1}, .dilation = {2, 1}, .ceil_mode = true});
       }},
      {"max 3d",
       {2, 8, 4, 5, 3},
       [](const Tensor& x) {
         return max_pool3d(x, {2, 3, 1}, {.stride = 1});
       }},
      {"max long window", {1, 2, 20, 20}, [](const Tensor& x) { return max_pool2d(x, 17, {.stride = 2}); }},
      {"avg 1d", {2, 3, 10}, [](const Tensor& x) { return avg_pool1d(x, 3, {.stride = 2, .padding = 1}); }},
      {"avg overlapping",
       {2, 16, 7, 6},
       [](const Tensor& x) {
         return avg_pool2d(x, 3, {.stride = 2, .padding = 1, .ceil_mode = true, .count_include_pad = false});
       }},
      {"avg ceil with padding",
       {1, 3, 6, 7},
       [](const Tensor& x) {
         return avg_pool2d(x, {3, 2}, {.stride = 3, .padding = 1, .ceil_mode = true});
       }},
      {"avg override", {1, 8, 4, 4, 4}, [](const Tensor& x) { return avg_pool3d(x, 2, {.divisor_override = 3}); }},
      {"adaptive avg",
       {2, 16, 7, 5},
       [](const Tensor& x) {
         return adaptive_avg_pool2d(x, {3, 4});
       }},
      {"adaptive avg up",
       {1, 3, 3, 2},
       [](const Tensor& x) {
         return adaptive_avg_pool2d(x, {5, -1});
       }},
      {"adaptive avg to one", {2, 8, 7, 7}, [](const Tensor& x) { return adaptive_avg_pool2d(x, 1); }},
      {"adaptive max",
       {2, 16, 7, 5},
       [](const Tensor& x) {
         return adaptive_max_pool2d(x, {3, 4});
       }},
      {"adaptive max 1d", {1, 3, 5}, [](const Tensor& x) { return adaptive_max_pool1d(x, 7); }},
      {"adaptive avg 3d",
       {1, 2, 5, 4, 3},
       [](const Tensor& x) {
         return adaptive_avg_pool3d(x, {2, 3, 1});
       }},
      {"single elements", {3, 1, 1, 1}, [](const Tensor& x) { return max_pool2d(x, 1); }},
      {"lp", {1, 2, 5, 4}, [](const Tensor& x) { return lp_pool2d(x, 2, 2, {.ceil_mode = true}); }, 1e-5},
  };
  return all;
}

TEST(Pool, DtypesDevicesAndLayoutsAgree) {
  manual_seed(1);
  for (const ImageCase& c : cases()) {
    expect_agreement(c);
  }
}

TEST(Pool, Gradcheck) {
  for (const Device device : test_devices()) {
    for (const ImageCase& c : cases()) {
      if (numel_of(c.shape) <= 300) {
        expect_gradients(c, device);
      }
    }
  }
}

TEST(Pool, IndicesAndUnpooling) {
  for (const Device device : test_devices()) {
    for (const bool last : {false, true}) {
      Tensor x =
          reshape(from_data({1.f, 5.f, 2.f, 2.f, 0.f, 9.f, 7.f, 3.f, -1.f, -1.f, -4.f, 8.f}, device), {1, 1, 3, 4});
      x = last ? channels_last(expand(x, {1, 2, 3, 4})) : contiguous(expand(x, {1, 2, 3, 4}));
      const MaxPoolResult result = max_pool_with_indices(x, 2, {2, 2}, {.stride = 1});
      EXPECT_EQ(result.indices.shape(), result.values.shape());
      expect_close(select(select(result.values, 0, 0), 0, 1), Values{9, 9, 7, 9, 9, 8}, 0, 0);
      expect_close(select(select(result.indices, 0, 0), 0, 1), Values{5, 5, 6, 5, 5, 11}, 0, 0);
      const Tensor back = max_unpool2d(result.values, result.indices, {3, 4});
      expect_close(select(select(back, 0, 0), 0, 0), Values{0, 0, 0, 0, 0, 9, 7, 0, 0, 0, 0, 8}, 0, 0);
    }
    const MaxPoolResult one = adaptive_max_pool_with_indices(from_data({1.f, 4.f, 2.f}, {1, 3}, device), 1, 1);
    EXPECT_EQ(one.indices.shape(), (Shape{1, 1}));
    EXPECT_EQ(one.indices.item(), 1);
  }
}

TEST(Pool, NanInfinityAndEmpty) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1, NAN, 3, -inf, -inf, -inf, NAN, NAN, 2}, {1, 1, 9}, device);
    const MaxPoolResult result = max_pool_with_indices(x, 1, 3);
    expect_close(result.values, Values{NAN, -inf, NAN}, 0, 0);
    expect_close(result.indices, Values{1, 3, 7}, 0, 0);
    const Tensor none = zeros({0, 3, 4, 4}, float32, device).requires_grad_();
    const Tensor y = max_pool2d(none, 2) + avg_pool2d(none, 2);
    EXPECT_EQ(y.shape(), (Shape{0, 3, 2, 2}));
    y.backward(y.detach());
    EXPECT_EQ(none.grad().shape(), none.shape());
  }
}

TEST(Pool, Errors) {
  const Tensor x = ones({1, 2, 4, 4});
  expect_error([&] { max_pool2d(ones({4, 4}), 2); }, "max_pool2d: expected x of shape (N, C, 2 spatial axes)");
  expect_error([&] { max_pool2d(x, {1, 2, 3}); }, "max_pool2d: expected size of 1 or 2 numbers, got [1, 2, 3]");
  expect_error([&] { max_pool2d(x, 0); }, "expected size of at least 1, got [0]");
  expect_error([&] { max_pool2d(x, 2, {.stride = 0}); }, "expected stride of at least 1, got [0]");
  expect_error([&] { max_pool2d(x, 2, {.padding = 2}); }, "expected a padding of at most half of the window");
  expect_error([&] { avg_pool2d(x, 5); }, "avg_pool2d: expected x of at least the window's size");
  expect_error([&] { avg_pool2d(x, 2, {.divisor_override = 0}); }, "expected a divisor_override other than 0");
  expect_error([&] { adaptive_avg_pool2d(x, {0, 1}); }, "adaptive_avg_pool2d: expected sizes of at least 1, or -1");
  expect_error([&] { max_pool1d(ones({1, 1, 1}), 2, {.padding = 1, .dilation = 2}); }, "window 0 has none");
  expect_error([&] { max_pool2d(ones({1, 2, 4, 4}, int64), 2); }, "expected a floating x, got int64");
  expect_error([&] { max_unpool2d(x, zeros({1, 2, 4, 4}), 8); }, "expected indices of int64");
}

}  // namespace pool_test
