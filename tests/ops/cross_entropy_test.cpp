#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace cross_entropy_test {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Reference {
  std::vector<double> losses;
  std::vector<double> dlogits;  // the gradient of Σ losses · scale
  std::vector<double> scales;   // the size of each gradient's terms
  double count = 0;
};

// `scale` is what each row's loss is multiplied by.
Reference reference(const Tensor& logits, const Tensor& targets, std::int64_t ignore,
                    const std::vector<double>& scale) {
  const std::vector<double> x = to_vector<double>(logits);
  const std::vector<std::int64_t> t = to_vector<std::int64_t>(targets);
  const std::size_t classes = logits.shape().back();
  Reference result{.losses = std::vector<double>(t.size()),
                   .dlogits = std::vector<double>(x.size()),
                   .scales = std::vector<double>(x.size()),
                   .count = 0};
  for (std::size_t row = 0; row < t.size(); ++row) {
    if (t[row] == ignore) {
      continue;
    }
    result.count += 1;
    const double* in = x.data() + row * classes;
    const double largest = *std::max_element(in, in + classes);
    double sum = 0;
    for (std::size_t i = 0; i < classes; ++i) {
      sum += std::exp(in[i] - largest);
    }
    result.losses[row] = largest + std::log(sum) - in[t[row]];
    for (std::size_t i = 0; i < classes; ++i) {
      const double p = std::exp(in[i] - largest) / sum;
      const double label = static_cast<std::int64_t>(i) == t[row] ? 1 : 0;
      result.dlogits[row * classes + i] = scale[row] * (p - label);
      result.scales[row * classes + i] = std::abs(scale[row]) * (p + label);
    }
  }
  return result;
}

double total(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) {
    sum += x;
  }
  return sum;
}

// Random targets for logits of shape `shape`, about every fifth of which is `ignore`.
Tensor some_targets(const Shape& shape, DType dtype, std::int64_t ignore) {
  const Shape rows = shape.slice(0, shape.size() - 1);
  const Tensor targets = randint(0, shape.back(), rows, int64);
  for (std::int64_t i = 0; i < targets.numel(); i += 5) {
    targets.data<std::int64_t>()[i] = ignore;
  }
  return targets.to(dtype);
}

const std::vector<Shape> kShapes{{7},       {1, 1},      {6, 2},       {9, 33},    {4, 1000}, {3, 1025},
                                 {7, 5000}, {3, 50'304}, {2, 100'001}, {3, 5, 65}, {600, 17}, {2, 3, 4, 10}};

TEST(CrossEntropy, MatchesReference) {
  for (const Device device : test_devices()) {
    for (const Shape& shape : kShapes) {
      for (const DType dtype : {float32, float64, float16, bfloat16}) {
        // On a GPU, the powers for 16-bit logits are approximations.
        const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 2e-6 : 1e-5;
        const auto expect_gradient = [&](const Tensor& dlogits, const Reference& wanted, const std::string& text) {
          const double limit = dtype == float64 ? 1e-11 : dtype == float32 ? 1e-5 : 2e-3;
          expect_rows_close(dlogits, wanted.dlogits, wanted.scales, 1, limit, text + " gradient");
        };
        const bool narrow = dtype == float16 || dtype == bfloat16;
        const std::int64_t ignore = narrow ? 1 : -100;
        const Tensor logits = randn(shape, dtype).to(device);
        const Tensor targets = some_targets(shape, narrow ? int32 : int64, ignore).to(device);
        const std::string what = to_string(shape) + " " + std::string(name_of(dtype)) + " on " + to_string(device);
        const std::int64_t rows = targets.numel();

        // Reduction::none
        const Tensor leaf = logits.detach().requires_grad_();
        const DType wide = accumulate_dtype(dtype);
        const Tensor dloss = randn(targets.shape(), wide).to(device);
        const Tensor losses = cross_entropy(leaf, targets, {.ignore_index = ignore, .reduction = Reduction::none});
        Reference expected = reference(logits, targets, ignore, to_vector<double>(dloss));
        EXPECT_EQ(losses.shape(), targets.shape());
        EXPECT_EQ(losses.dtype(), wide);
        expect_close(losses, expected.losses, tolerance, tolerance, what);
        losses.backward(dloss);
        expect_gradient(leaf.grad(), expected, what);

        // Reduction::sum
        leaf.set_grad({});
        const Tensor sum = cross_entropy(leaf, targets, {.ignore_index = ignore, .reduction = Reduction::sum});
        EXPECT_EQ(sum.shape(), Shape{});
        expect_close(sum, std::vector<double>{total(expected.losses)}, tolerance, tolerance, what);
        sum.backward();
        expected = reference(logits, targets, ignore, std::vector<double>(rows, 1));
        expect_gradient(leaf.grad(), expected, what);

        // Reduction::mean
        leaf.set_grad({});
        const Tensor mean = cross_entropy(leaf, targets, {.ignore_index = ignore});
        if (expected.count == 0) {
          EXPECT_TRUE(std::isnan(mean.item())) << what;
          continue;
        }
        expect_close(mean, std::vector<double>{total(expected.losses) / expected.count}, tolerance, tolerance, what);
        mean.backward(full({}, 3, wide, device));
        expected = reference(logits, targets, ignore, std::vector<double>(rows, 3 / expected.count));
        expect_gradient(leaf.grad(), expected, what);
      }
    }
  }
}

TEST(CrossEntropy, ExtremeLogits) {
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {3, 600, 5000}) {
      std::vector<float> values(4 * n, -1e4f);
      values[1] = 1e4f;                                                 // confident and right
      values[n] = 1e4f;                                                 // confident and wrong
      std::fill(values.begin() + 2 * n, values.begin() + 3 * n, 1e4f);  // all equal
      std::fill(values.begin() + 3 * n, values.end(), static_cast<float>(-kInf));
      values[3 * n + 1] = 0;  // all masked except the target
      const Tensor logits = from_data(values, {4, n}, device).requires_grad_();
      const Tensor loss =
          cross_entropy(logits, from_data<std::int64_t>({1, 1, 1, 1}, device), {.reduction = Reduction::none});
      expect_close(loss, std::vector<double>{0, 2e4, std::log(static_cast<double>(n)), 0}, 1e-6, 1e-6);
      loss.backward(ones({4}, float32, device));
      const std::vector<float> g = to_vector<float>(logits.grad());
      EXPECT_EQ(g[0], 0);
      EXPECT_EQ(g[1], 0);
      EXPECT_EQ(g[n], 1);
      EXPECT_EQ(g[n + 1], -1);
      EXPECT_NEAR(g[2 * n], 1.0 / static_cast<double>(n), 1e-3 / static_cast<double>(n));
      EXPECT_EQ(g[3 * n], 0);
      EXPECT_EQ(g[3 * n + 1], 0);
    }
  }
}

TEST(CrossEntropy, IgnoredRows) {
  for (const Device device : test_devices()) {
    const Tensor logits = randn({3, 5}, float32, device).requires_grad_();
    const Tensor none_left = full({3}, -100, int64, device);
    EXPECT_TRUE(std::isnan(cross_entropy(logits, none_left).item()));
    const Tensor sum = cross_entropy(logits, none_left, {.reduction = Reduction::sum});
    EXPECT_EQ(sum.item(), 0);
    sum.backward();
    EXPECT_EQ(to_vector<float>(logits.grad()), std::vector<float>(15, 0));

    // An ignored row may contain anything.
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const Tensor odd = from_data({nan, nan, 1.f, 1.f}, {2, 2}, device).requires_grad_();
    const Tensor loss = cross_entropy(odd, from_data<std::int64_t>({-100, 0}, device));
    EXPECT_NEAR(loss.item(), std::log(2.0), 1e-6);
    loss.backward();
    expect_close(odd.grad(), std::vector<double>{0, 0, -0.5, 0.5}, 1e-6, 0);
  }
}

TEST(CrossEntropy, EmptyBatch) {
  for (const Device device : test_devices()) {
    const Tensor logits = zeros({0, 5}, float32, device).requires_grad_();
    const Tensor targets = zeros({0}, int64, device);
    EXPECT_TRUE(std::isnan(cross_entropy(logits, targets).item()));
    EXPECT_EQ(cross_entropy(logits, targets, {.reduction = Reduction::none}).shape(), Shape({0}));
    const Tensor sum = cross_entropy(logits, targets, {.reduction = Reduction::sum});
    EXPECT_EQ(sum.item(), 0);
    sum.backward();
    EXPECT_EQ(logits.grad().shape(), Shape({0, 5}));
  }
}

TEST(CrossEntropy, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor logits = randn({2, 3, 6}, float64, device);
    const Tensor targets = from_data<std::int64_t>({0, 5, -100, 2, 2, 1}, {2, 3}, device);
    for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
      EXPECT_TRUE(autograd::gradcheck(
          [&](const Tensor& x) { return cross_entropy(x, targets, {.reduction = reduction}); }, {logits}));
    }
  }
}

TEST(CrossEntropy, NonContiguousInputs) {
  for (const Device device : test_devices()) {
    const Tensor logits = transpose(randn({30, 40}, float32, device), 0, 1);
    const Tensor targets = slice(randint(0, 30, {80}, int64, device), 0, 0, 80, 2);
    const Reference expected = reference(logits, targets, -100, std::vector<double>(40, 1));
    expect_close(cross_entropy(logits, targets, {.reduction = Reduction::none}), expected.losses, 1e-6, 1e-6);
    const Tensor odd = slice(randn({1 + 3 * 5001}, float32, device), 0, 1, 1 + 3 * 5001);
    const Tensor unaligned = reshape(odd, {3, 5001});
    const Tensor labels = from_data<std::int32_t>({0, 5000, 77}, device);
    const Reference wide = reference(unaligned, labels, -100, {1, 1, 1});
    expect_close(cross_entropy(unaligned, labels, {.reduction = Reduction::none}), wide.losses, 1e-6, 1e-6);
  }
}

TEST(CrossEntropy, RunsAndThreadCountsAgreeBitForBit) {
  const int before = num_threads();
  for (const Device device : test_devices()) {
    for (const Shape& shape : kShapes) {
      const Tensor logits = randn(shape).to(device);
      const Tensor targets = some_targets(shape, int64, -100).to(device);
      std::vector<float> losses, gradients;
      for (const int threads : {1, 2, 2}) {
        set_num_threads(threads);
        const Tensor leaf = logits.detach().requires_grad_();
        const Tensor loss = cross_entropy(leaf, targets, {.reduction = Reduction::sum});
        loss.backward();
        losses.push_back(static_cast<float>(loss.item()));
        const std::vector<float> g = to_vector<float>(leaf.grad());
        EXPECT_TRUE(gradients.empty() || gradients == g) << to_string(shape);
        gradients = g;
      }
      EXPECT_TRUE(losses[0] == losses[1] && losses[1] == losses[2]) << to_string(shape);
    }
  }
  set_num_threads(before);
}

TEST(CrossEntropy, TargetsOutOfRange) {
  const Tensor logits = randn({3, 5});
  expect_error(
      [&] {
        cross_entropy(logits, from_data<std::int64_t>({0, 5, 1}));
      },
      "cross_entropy: expected targets in [0, 5) or ignore_index -100, got 5 in row 1");
  expect_error([&] { cross_entropy(logits, from_data<std::int32_t>({0, 1, -1})); }, "got -1 in row 2");
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  for (const std::int64_t n : {5, 5000}) {
    const Tensor x = randn({3, n}, float32, Device::cuda()).requires_grad_();
    const Tensor losses =
        cross_entropy(x, from_data<std::int64_t>({0, n, -1}, Device::cuda()), {.reduction = Reduction::none});
    const std::vector<float> values = to_vector<float>(losses);
    EXPECT_TRUE(std::isfinite(values[0]) && std::isnan(values[1]) && std::isnan(values[2]));
    losses.backward(ones({3}, float32, Device::cuda()));
    const std::vector<float> g = to_vector<float>(x.grad());
    for (std::int64_t i = 0; i < n; ++i) {
      ASSERT_TRUE(std::isfinite(g[i]) && std::isnan(g[n + i]) && std::isnan(g[2 * n + i]));
    }
  }
}

TEST(CrossEntropy, Errors) {
  const Tensor logits = randn({3, 5});
  expect_error([&] { cross_entropy(logits, zeros({4}, int64)); },
               "cross_entropy: expected targets of shape [3] for logits of shape [3, 5], got [4]");
  expect_error([&] { cross_entropy(logits, zeros({3})); },
               "cross_entropy: expected labels of int64 or int32, or probabilities");
  expect_error(
      [&] {
        cross_entropy(zeros({3, 5}, int64), zeros({3}, int64));
      },
      "cross_entropy: expected floating logits, got int64");
  expect_error([&] { cross_entropy(zeros({}), zeros({}, int64)); }, "cross_entropy: expected logits of shape");
}

}  // namespace cross_entropy_test
