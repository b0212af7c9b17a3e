#include <numeric>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::gradcheck;
using autograd::gradgradcheck;

namespace view_test {

// A tensor of the given shape with elements 0, 1, 2, ….
Tensor counting(const Shape& shape, Device device = Device::cpu()) {
  return reshape(arange(static_cast<double>(numel_of(shape)), float64, device), shape);
}

bool shares(const Tensor& a, const Tensor& b) { return a.handle()->storage == b.handle()->storage; }

TEST(View, PermuteAndTranspose) {
  for (const Device device : test_devices()) {
    const Tensor x = counting({2, 3, 4}, device);
    const Tensor y = permute(x, {2, 0, -2});
    EXPECT_EQ(y.shape(), (Shape{4, 2, 3}));
    EXPECT_TRUE(shares(x, y));
    const std::vector<double> values = to_vector<double>(y);
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 2; ++j) {
        for (int k = 0; k < 3; ++k) {
          EXPECT_EQ(values[(i * 2 + j) * 3 + k], j * 12 + k * 4 + i);
        }
      }
    }
    expect_close(transpose(counting({2, 3}, device), 0, -1), {0, 3, 1, 4, 2, 5}, 0, 0);
  }
}

TEST(View, SliceAndSelect) {
  for (const Device device : test_devices()) {
    const Tensor x = counting({3, 5}, device);
    expect_close(slice(x, 1, 1, 5, 2), {1, 3, 6, 8, 11, 13}, 0, 0);
    expect_close(slice(x, 0, -2, 100), {5, 6, 7, 8, 9, 10, 11, 12, 13, 14}, 0, 0);
    expect_close(slice(slice(x, 1, 1, 4), 1, 1, 3), {2, 3, 7, 8, 12, 13}, 0, 0);
    EXPECT_EQ(slice(x, 1, 4, 2).shape(), (Shape{3, 0}));
    expect_close(select(x, 0, 1), {5, 6, 7, 8, 9}, 0, 0);
    expect_close(select(x, 1, -1), {4, 9, 14}, 0, 0);
    EXPECT_TRUE(shares(x, select(x, 1, -1)));
  }
}

TEST(View, WritingThroughAViewIsSeen) {
  for (const Device device : test_devices()) {
    const Tensor x = counting({2, 3}, device);
    fill_data(select(x, 1, 1), -1);
    expect_close(x, {0, -1, 2, 3, -1, 5}, 0, 0);
  }
}

TEST(View, ReshapeIsAViewWherePossible) {
  const Tensor x = counting({4, 6});
  EXPECT_TRUE(shares(x, reshape(x, {2, 2, 3, 2})));
  EXPECT_EQ(reshape(x, {3, -1}).shape(), (Shape{3, 8}));
  // The rows of a slice are not adjacent in memory, but each row can be split.
  const Tensor part = slice(x, 1, 0, 4);
  const Tensor cut = reshape(part, {2, 2, 2, 2});
  EXPECT_TRUE(shares(x, cut));
  expect_close(cut, {0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21}, 0, 0);
  // Merged rows cannot be viewed without a copy.
  const Tensor joined = reshape(part, {16});
  EXPECT_FALSE(shares(x, joined));
  expect_close(joined, to_vector<double>(part), 0, 0);
  expect_error([&] { view(part, {16}); }, "cannot be viewed as [16] without a copy");
  // Swapped axes cannot be merged; merged axes stay merged.
  const Tensor swapped = permute(counting({2, 3, 4}), {2, 0, 1});
  EXPECT_TRUE(shares(swapped, reshape(swapped, {4, 6})));
  expect_close(reshape(swapped, {4, 6}), to_vector<double>(swapped), 0, 0);
  EXPECT_FALSE(shares(swapped, reshape(swapped, {24})));
  expect_close(reshape(swapped, {24}), to_vector<double>(swapped), 0, 0);
}

TEST(View, ReshapeOfEveryLayoutKeepsTheOrder) {
  // Reshapes every permutation of a (2, 3, 1, 4) tensor, sliced or not, to many shapes. The order of the elements must
  // not change.
  std::vector<std::int64_t> order{0, 1, 2, 3};
  do {
    for (const bool sliced : {false, true}) {
      Tensor x = counting({2, 3, 1, 4});
      x = sliced ? slice(x, 3, 0, 4, 2) : x;
      const Tensor y = permute(x, Dims(std::span<const std::int64_t>(order)));
      const std::vector<double> expected = to_vector<double>(y);
      for (const Shape& shape : {Shape{-1}, Shape{2, -1}, Shape{-1, 2}, Shape{3, -1}, Shape{-1, 3}, Shape{2, 3, -1},
                                 Shape{1, 2, 1, -1, 1}, Shape{-1, 3, 2}, Shape{2, 2, -1}, Shape{-1, 2, 2}}) {
        expect_close(reshape(y, shape), expected, 0, 0);
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(View, EmptyTensors) {
  const Tensor x = zeros({0, 3});
  EXPECT_EQ(reshape(x, {3, 0, 7}).shape(), (Shape{3, 0, 7}));
  EXPECT_EQ(transpose(x, 0, 1).shape(), (Shape{3, 0}));
  EXPECT_EQ(contiguous(transpose(x, 0, 1)).numel(), 0);
  EXPECT_EQ(reshape(slice(counting({4, 6}), 1, 2, 2), {0}).shape(), (Shape{0}));
  expect_error([&] { reshape(x, {0, -1}); }, "cannot reshape 0 elements");
}

TEST(View, ExpandSqueezeUnsqueezeFlatten) {
  for (const Device device : test_devices()) {
    const Tensor x = counting({3, 1}, device);
    expect_close(expand(x, {2, -1, 2}), {0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2}, 0, 0);
    EXPECT_EQ(squeeze(x, 1).shape(), (Shape{3}));
    EXPECT_EQ(squeeze(x, 0).shape(), (Shape{3, 1}));
    EXPECT_EQ(squeeze(unsqueeze(unsqueeze(x, 0), -1)).shape(), (Shape{3}));
    EXPECT_EQ(unsqueeze(x, 1).shape(), (Shape{3, 1, 1}));
    EXPECT_EQ(unsqueeze(zeros({}), 0).shape(), (Shape{1}));
    EXPECT_EQ(flatten(zeros({2, 3, 4}), 1).shape(), (Shape{2, 12}));
    EXPECT_EQ(flatten(zeros({})).shape(), (Shape{1}));
  }
}

TEST(View, Split) {
  const Tensors parts = split(counting({2, 5}), 2, 1);
  ASSERT_EQ(parts.size(), 3u);
  expect_close(parts[1], {2, 3, 7, 8}, 0, 0);
  expect_close(parts[2], {4, 9}, 0, 0);
  EXPECT_EQ(split(zeros({0, 2}), 3).size(), 1u);
  const Tensors uneven = split(counting({2, 5}), {1, 0, 4}, -1);
  ASSERT_EQ(uneven.size(), 3u);
  expect_close(uneven[0], {0, 5}, 0, 0);
  EXPECT_EQ(uneven[1].shape(), (Shape{2, 0}));
  expect_close(uneven[2], {1, 2, 3, 4, 6, 7, 8, 9}, 0, 0);
}

TEST(View, ContiguousReturnsTheTensorOrACopy) {
  const Tensor x = counting({2, 3});
  EXPECT_TRUE(contiguous(x).is_same(x));
  const Tensor y = contiguous(transpose(x, 0, 1));
  EXPECT_TRUE(y.is_contiguous());
  EXPECT_FALSE(shares(x, y));
}

TEST(View, CloneCopiesTheElements) {
  for (const Device device : test_devices()) {
    const Tensor x = transpose(counting({2, 3}, device), 0, 1);
    const Tensor y = clone(x);
    EXPECT_FALSE(shares(x, y));
    EXPECT_TRUE(y.is_contiguous());
    expect_close(y, x, 0, 0);
    EXPECT_FALSE(shares(y, clone(y)));
  }
}

TEST(View, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 2}, float64, device);
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return permute(a, {2, 0, 1}); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return transpose(a, 0, 2); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return reshape(transpose(a, 0, 1), {6, -1}); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return slice(a, 1, 1, 4, 2); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return slice(a, 1, 3, 1); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return select(a, -1, 1); }, {x}));
    EXPECT_TRUE(gradgradcheck([](const Tensor& a) { return slice(a, 1, 0, 2) * slice(a, 1, 1, 3); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return clone(transpose(a, 0, 1)); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return expand(unsqueeze(a, 1), {5, 3, 2, 4, 2}); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return contiguous(transpose(a, 0, 1)); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return split(a, 3, 1); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return split(a, {1, 3}, 1); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return flatten(squeeze(unsqueeze(a, 0), 0), 0, 1); }, {x}));
  }
}

TEST(View, Errors) {
  const Tensor x = zeros({2, 3});
  expect_error([&] { reshape(x, {4}); }, "cannot reshape 6 elements of shape [2, 3] to [4]");
  expect_error([&] { reshape(x, {-1, -1}); }, "at most one -1");
  expect_error([&] { reshape(x, {-1, 4}); }, "to [-1, 4]");
  expect_error([&] { transpose(x, 0, 2); }, "transpose: expected an axis in [-2, 2), got 2");
  expect_error([&] { permute(x, {0}); }, "permute: expected 2 axes, got [0]");
  expect_error([&] { permute(x, {0, -2}); }, "every axis once");
  expect_error([&] { slice(x, 0, 0, 1, 0); }, "step of at least 1");
  expect_error([&] { select(x, 1, 3); }, "select: expected an index in [-3, 3), got 3");
  expect_error([&] { expand(x, {4, 3}); }, "shape [2, 3] does not broadcast to [4, 3]");
  expect_error([&] { expand(x, {3}); }, "expected at least 2 axes");
  expect_error([&] { split(x, 0); }, "parts of at least 1");
  expect_error([&] { split(x, {1, 5}); }, "split: expected sizes that add up to 2, got more");
  expect_error([&] { split(x, {1, -1}); }, "split: expected sizes of at least 0, got -1");
  expect_error([&] { split(x, {1, 0}); }, "split: expected sizes that add up to");
  expect_error([&] { unsqueeze(x, 3); }, "unsqueeze: expected an axis in [-3, 3), got 3");
}

TEST(View, SliceByHugeSteps) {
  const std::int64_t most = INT64_MAX;
  for (const Device device : test_devices()) {
    const Tensor x = arange(5, int64, device);
    for (const std::int64_t step : {std::int64_t{5}, std::int64_t{1} << 62, most - 3, most}) {
      expect_close(slice(x, 0, 0, 5, step), from_data<double>({0.0}), 0, 0);
      expect_close(slice(x, 0, 2, most, step), from_data<double>({2.0}), 0, 0);
      expect_close(slice(x, 0, INT64_MIN, most, step), from_data<double>({0.0}), 0, 0);
      EXPECT_EQ(slice(x, 0, 3, 3, step).numel(), 0);
      expect_close(slice(reshape(x, {1, 5}), 1, 1, 5, step), full({1, 1}, 1), 0, 0);
      expect_close(slice(expand(x, {3, 5}), 1, 1, 5, step), {1, 1, 1}, 0, 0);
    }
    expect_close(slice(x, 0, 0, 5, 4), {0, 4}, 0, 0);
    const Tensor leaf = ones({2, 5}, float32, device).requires_grad_();
    sum(slice(leaf, 1, 1, 5, most)).backward();
    expect_close(leaf.grad(), {0, 1, 0, 0, 0, 0, 1, 0, 0, 0}, 0, 0);
  }
  const Tensor parts = split(arange(5), most)[0];
  expect_close(parts, {0, 1, 2, 3, 4}, 0, 0);
}

TEST(View, ReshapeOfEmptyTensorsToHugeShapes) {
  const std::int64_t most = INT64_MAX;
  for (const Shape& shape : {Shape{0, most, most}, Shape{most, most, 0}, Shape{-1, 0, most, most}}) {
    expect_error([&] { reshape(zeros({0}), shape); }, "too many elements");
  }
  EXPECT_EQ(reshape(zeros({0}), {most, 0}).shape(), (Shape{most, 0}));
}

}  // namespace view_test
