#include <gtest/gtest.h>

#include "image_cases.h"
#include <mica/nn/group_norm.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/norm/group_norm.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;

namespace group_norm_test {

Tensor channel_numbers(std::int64_t channels, const Tensor& like) {
  return (arange(static_cast<double>(channels), float64) * 0.5 - 1).to(like.dtype()).to(like.device());
}

ImageCase of_groups(const char* name, const Shape& shape, std::int64_t groups) {
  return {name, shape,
          [=](const Tensor& x) {
            const Tensor weight = channel_numbers(shape[1], x);
            return group_norm(x, groups, weight, weight * 2 + 1, 1e-3);
          },
          2e-5};
}

const std::vector<ImageCase>& cases() {
  static const std::vector<ImageCase> all{
      of_groups("two groups", {2, 6, 3, 4}, 2),
      of_groups("one group", {3, 4, 5}, 1),
      of_groups("no spatial axes", {4, 6}, 3),
      of_groups("3d", {2, 4, 2, 3, 2}, 4),
      {"instances", {2, 3, 4, 5}, [](const Tensor& x) { return instance_norm(x); }, 2e-5},
  };
  return all;
}

TEST(GroupNorm, DtypesDevicesAndLayoutsAgree) {
  manual_seed(1);
  for (const ImageCase& c : cases()) {
    expect_agreement(c);
  }
}

TEST(GroupNorm, Gradcheck) {
  for (const Device device : test_devices()) {
    for (const ImageCase& c : cases()) {
      expect_gradients(c, device);
    }
    const auto norm = [](const Tensor& x, const Tensor& w, const Tensor& b) { return group_norm(x, 2, w, b); };
    const Tensors in{randn({2, 4, 3}, float64, device), randn({4}, float64, device), randn({4}, float64, device)};
    EXPECT_TRUE(autograd::gradcheck(norm, in));
    EXPECT_TRUE(autograd::gradgradcheck(norm, in));
  }
}

TEST(GroupNorm, Modules) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 5}, float64, device);
    nn::GroupNorm groups(2, 4);
    groups.to(device, float64);
    expect_close(groups(x), group_norm(x, 2), 1e-12, 1e-12);
    nn::InstanceNorm1d instances(4, {.momentum = 0.25, .affine = true, .track_running_stats = true});
    instances.to(device, float64);
    expect_close(instances(x), instance_norm(x), 1e-12, 1e-12);
    const Tensor means = mean(mean(x, {2}), {0}), variances = mean(var(x, {2}), {0});
    expect_close(instances.running_mean, means * 0.25, 1e-12, 1e-12);
    expect_close(instances.running_var, variances * 0.25 + 0.75, 1e-12, 1e-12);
    EXPECT_EQ(instances.num_batches_tracked.item(), 1);
    EXPECT_EQ(instances(select(x, 0, 0)).shape(), (Shape{4, 5}));
    instances.eval();
    const Tensor expected = (x - reshape(instances.running_mean, {1, 4, 1})) *
                            rsqrt(reshape(instances.running_var, {1, 4, 1}) + instances.eps);
    expect_close(instances(x), expected, 1e-12, 1e-12);
  }
}

TEST(GroupNorm, EmptyAndErrors) {
  EXPECT_EQ(group_norm(zeros({0, 4, 2}), 2, ones({4})).shape(), (Shape{0, 4, 2}));
  const Tensor x = ones({2, 4, 3});
  expect_error([&] { group_norm(x, 3); }, "group_norm: expected groups that divide 4 channels, got 3");
  expect_error([&] { group_norm(x, 2, ones({3})); }, "group_norm: expected weight of shape [4], got [3]");
  expect_error([&] { group_norm(x, 2, {}, ones({4}, float64)); }, "group_norm: expected bias of float32");
  expect_error([&] { group_norm(ones({4}), 1); }, "group_norm: expected a floating x of at least two axes");
  expect_error([&] { group_norm(x, 2, {}, {}, -1); }, "group_norm: expected eps of at least 0, got -1");
  expect_error(
      [&] {
        instance_norm(ones({2, 4, 1}));
      },
      "instance_norm: expected a floating x (N, C, …) of more than one");
  expect_error([] { nn::GroupNorm(3, 4); }, "GroupNorm: expected num_groups that divides num_channels, got 3 and 4");
  expect_error(
      [] {
        nn::InstanceNorm2d(4)(ones({2, 3, 5, 5}));
      },
      "InstanceNorm2d: expected x of shape (N, 4, 2 spatial");
}

}  // namespace group_norm_test
