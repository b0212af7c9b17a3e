// Tests every option of cross_entropy, and combinations of them, against a plain reference in float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "tests/launches.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace cross_entropy_options_test {

constexpr double kInf = std::numeric_limits<double>::infinity();

double total(const std::vector<double>& v) { return std::accumulate(v.begin(), v.end(), 0.0); }

struct Reference {
  std::vector<double> losses;
  std::vector<double> dlogits;  // the gradient of the reduced loss, times dloss
  std::vector<double> scales;   // the size of each gradient's terms, without the factor of the cap's derivative
  double reduced = 0;           // the mean or the sum
};

/// Computes the loss by its definition, with an explicit target distribution for each row.
Reference reference(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& o,
                    const std::vector<double>& dloss) {
  const std::vector<double> x = to_vector<double>(logits);
  const bool given = is_floating(targets.dtype());
  const std::vector<double> t = to_vector<double>(targets);
  const std::size_t classes = logits.shape().back();
  const std::size_t rows = x.size() / classes;
  const double smallest = logits.dtype() == float16 ? 0x1p-14 : 0;  // for smaller results, the spacing is constant
  const std::vector<double> w = o.weight.defined() ? to_vector<double>(o.weight) : std::vector<double>(classes, 1.0);
  Reference result{.losses = std::vector<double>(rows),
                   .dlogits = std::vector<double>(x.size()),
                   .scales = std::vector<double>(x.size())};
  double denominator = given ? static_cast<double>(rows) : 0;
  for (std::size_t row = 0; row < rows; ++row) {
    const bool ignored = !given && t[row] == static_cast<double>(o.ignore_index);
    if (!given && !ignored) {
      denominator += w[static_cast<std::size_t>(t[row])];
    }
  }
  for (std::size_t row = 0; row < rows; ++row) {
    if (!given && t[row] == static_cast<double>(o.ignore_index)) {
      continue;
    }
    std::vector<double> z(classes), slope(classes), u(classes);
    for (std::size_t i = 0; i < classes; ++i) {
      const double scaled = o.logit_scale * x[row * classes + i];
      const double part = o.softcap > 0 ? std::tanh(scaled / o.softcap) : 0;
      z[i] = o.softcap > 0 ? o.softcap * part : scaled;
      slope[i] = o.logit_scale * (1 - part * part);
      const double target = given ? t[row * classes + i] : static_cast<double>(i) == t[row] ? 1 : 0;
      u[i] = w[i] * ((1 - o.label_smoothing) * target + o.label_smoothing / static_cast<double>(classes));
    }
    const double largest = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double value : z) {
      sum += std::exp(value - largest);
    }
    const double log_sum = std::log(sum);
    double loss = 0;
    for (std::size_t i = 0; i < classes; ++i) {
      loss += u[i] == 0 ? 0 : u[i] * (largest - z[i] + log_sum);
    }
    result.losses[row] = loss;
    const double g = o.reduction == Reduction::none  ? dloss[row]
                     : o.reduction == Reduction::sum ? dloss[0]
                                                     : dloss[0] / denominator;
    const double mass = total(u);
    for (std::size_t i = 0; i < classes; ++i) {
      const double p = mass * std::exp(z[i] - largest) / sum;
      result.dlogits[row * classes + i] = g * (p - u[i]) * slope[i];
      result.scales[row * classes + i] = std::max(std::abs(g * o.logit_scale) * (p + u[i]), smallest);
    }
  }
  result.reduced = total(result.losses) / (o.reduction == Reduction::mean ? denominator : 1);
  return result;
}

/// Random labels, about every fifth of which is `ignore`.
Tensor some_labels(const Shape& rows, std::int64_t classes, DType dtype, std::int64_t ignore) {
  const Tensor labels = randint(0, classes, rows, int64);
  for (std::int64_t i = 1; i < labels.numel(); i += 5) {
    labels.data<std::int64_t>()[i] = ignore;
  }
  return labels.to(dtype);
}

/// Random probabilities, with some zeros, whose rows do not quite sum to 1.
Tensor some_probabilities(const Shape& shape, DType dtype) {
  const Tensor raw = relu(randn(shape, float32));
  const double classes = static_cast<double>(shape.back());
  return (raw * (2 / classes)).to(dtype);
}

struct Combination {
  bool weighted;
  double smoothing;
  double scale;
  double softcap;
  bool given;
  Reduction reduction;

  std::string text() const {
    return fmt::format("{} smoothing {} scale {} softcap {} {} reduction {}", weighted ? "weighted" : "", smoothing,
                       scale, softcap, given ? "probabilities" : "labels", static_cast<int>(reduction));
  }
};

std::vector<Combination> combinations() {
  std::vector<Combination> all;
  for (const bool weighted : {false, true}) {
    for (const double smoothing : {0.0, 0.1}) {
      for (const auto& [scale, softcap] : std::vector<std::pair<double, double>>{{1, 0}, {0.7, 0}, {1, 4}, {-1.5, 3}}) {
        for (const bool given : {false, true}) {
          for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
            all.push_back({weighted, smoothing, scale, softcap, given, reduction});
          }
        }
      }
    }
  }
  return all;
}

struct Inputs {
  Tensor logits;
  Tensor targets;
  Tensor dloss;
  CrossEntropyOptions options;

  Inputs(const Combination& c, const Shape& shape, DType dtype, Device device) {
    const Shape rows = shape.slice(0, shape.size() - 1);
    logits = (randn(shape, float32) * 2).to(dtype).to(device);
    options = {.ignore_index = 1,
               .reduction = c.reduction,
               .weight = c.weighted ? (rand({shape.back()}, float32) + 0.25).to(dtype).to(device) : Tensor{},
               .label_smoothing = c.smoothing,
               .logit_scale = c.scale,
               .softcap = c.softcap};
    if (shape.back() == 1) {
      options.ignore_index = -100;
    }
    targets = c.given
                  ? some_probabilities(shape, dtype).to(device)
                  : some_labels(rows, shape.back(), dtype == float32 ? int32 : int64, options.ignore_index).to(device);
    dloss = randn(c.reduction == Reduction::none ? rows : Shape{}, accumulate_dtype(dtype)).to(device);
  }
};

struct Tolerance {
  double loss;
  double gradient;  // relative to the size of its terms
};

// For 16-bit logits with a cap, the CUDA kernels' tanh has an error of 2⁻¹¹, and the gradient that times the cap.
Tolerance tolerance_of(DType dtype) {
  switch (dtype) {
    case float64: return {1e-12, 1e-11};
    case float32: return {1e-5, 2e-5};
    case float16: return {3e-3, 5e-3};
    default: return {1.6e-2, 5e-3};
  }
}

void compare(const Inputs& in, bool in_place, const std::string& what) {
  const Reference expected = reference(in.logits, in.targets, in.options, to_vector<double>(in.dloss));
  const Tolerance tolerance = tolerance_of(in.logits.dtype());
  const Tensor leaf = clone(in.logits).detach().requires_grad_();
  CrossEntropyOptions options = in.options;
  options.in_place = in_place;
  const Tensor loss = cross_entropy(in_place ? clone(leaf) : leaf, in.targets, options);
  EXPECT_EQ(loss.dtype(), accumulate_dtype(leaf.dtype())) << what;
  if (in.options.reduction == Reduction::none) {
    expect_close(loss, expected.losses, tolerance.loss, tolerance.loss, what);
  } else {
    expect_close(loss, std::vector<double>{expected.reduced}, tolerance.loss, tolerance.loss, what);
  }
  loss.backward(in.dloss);
  expect_rows_close(leaf.grad(), expected.dlogits, expected.scales, 1, tolerance.gradient, what + " gradient");
}

TEST(CrossEntropyOptions, EveryCombinationMatchesReference) {
  for (const Device device : test_devices()) {
    for (const Combination& c : combinations()) {
      for (const Shape& shape : std::vector<Shape>{{6, 7}, {2, 3, 40}}) {
        const Inputs in(c, shape, float64, device);
        compare(in, false, c.text() + " " + to_string(shape));
        compare(in, true, c.text() + " in place " + to_string(shape));
      }
    }
  }
}

TEST(CrossEntropyOptions, EveryDtypeAndLengthMatchesReference) {
  // Short rows, rows of one block and of a cluster, and unaligned rows.
  const std::vector<Shape> shapes{{3, 1},    {5, 33},   {4, 1000},   {7, 1032},
                                  {9, 1025}, {6, 5003}, {3, 50'304}, {3, 50'257}};
  std::size_t turn = 0;
  const std::vector<Combination> all = combinations();
  for (const Device device : test_devices()) {
    const cuda::LaunchRecord record;
    for (const DType dtype : {float32, float16, bfloat16, float64}) {
      for (const Shape& shape : shapes) {
        // Only a few combinations for each shape. 7 has no factor in common with their number, so that all get a turn.
        for (int i = 0; i < (device.is_cpu() && shape.back() > 10'000 ? 1 : 6); ++i, turn += 7) {
          const Combination& c = all[turn % all.size()];
          const Inputs in(c, shape, dtype, device);
          const std::string what =
              c.text() + " " + to_string(shape) + " " + std::string(name_of(dtype)) + " on " + to_string(device);
          compare(in, false, what);
          compare(in, true, what + " in place");
        }
      }
    }
    expect_launched(record, device, {"cross_entropy_rows", "cross_entropy_backward_rows", "cross_entropy_scale_rows"});
    if (gpu_has_clusters()) {
      expect_launched(record, device, {"cross_entropy_stream<block>"});
    }
  }
}

TEST(CrossEntropyOptions, WideRowsMatchReference) {
  for (const Device device : test_devices()) {
    const bool cpu = device.is_cpu();
    for (const std::int64_t classes : {128'256, 128'257, 300'007, 1'000'003}) {
      if (cpu && classes > 128'257) {
        continue;  // the CPU has a single kernel
      }
      for (const DType dtype : {bfloat16, float32}) {
        const Inputs in(
            {.weighted = true, .smoothing = 0.1, .scale = 1, .softcap = 5, .given = false, .reduction = Reduction::sum},
            {3, classes}, dtype, device);
        compare(in, false, std::to_string(classes));
        compare(in, true, std::to_string(classes) + " in place");
        const Inputs plain(
            {.weighted = false, .smoothing = 0, .scale = 1, .softcap = 0, .given = false, .reduction = Reduction::none},
            {5, classes}, dtype, device);
        const cuda::LaunchRecord record;
        compare(plain, false, std::to_string(classes) + " plain");
        compare(plain, true, std::to_string(classes) + " plain in place");
        if (gpu_has_clusters() && classes <= 128'257) {
          expect_launched(record, device, {"cross_entropy_stream<cluster>"}, std::to_string(classes));
        }
      }
    }
  }
}

TEST(CrossEntropyOptions, ManyRowsStreamThroughEachBlock) {
  // More rows than blocks, so that each block processes several, including ignored ones.
  for (const Device device : test_devices()) {
    // The longer rows belong to clusters in float32.
    const std::vector<Shape> shapes =
        device.is_cpu() ? std::vector<Shape>{{40, 2051}} : std::vector<Shape>{{3001, 2051}, {401, 29'001}};
    for (const Shape& shape : shapes) {
      for (const DType dtype : {bfloat16, float32}) {
        const Inputs in(
            {.weighted = false, .smoothing = 0, .scale = 1, .softcap = 0, .given = false, .reduction = Reduction::none},
            shape, dtype, device);
        compare(in, false, "");
        compare(in, true, "in place");
      }
    }
  }
}

TEST(CrossEntropyOptions, StridedInputs) {
  for (const Device device : test_devices()) {
    const Tensor logits = transpose(randn({30, 40}, float64, device), 0, 1);
    const Tensor labels = slice(randint(0, 30, {80}, int64, device), 0, 0, 80, 2);
    const Tensor weight = slice(rand({90}, float64, device), 0, 0, 90, 3);
    const Tensor given = transpose(rand({30, 40}, float64, device), 0, 1);
    const CrossEntropyOptions options{.reduction = Reduction::none, .weight = weight, .label_smoothing = 0.2};
    const std::vector<double> ones(40, 1.0);
    for (const Tensor& targets : {labels, given}) {
      const Reference expected = reference(logits, targets, options, ones);
      const Tensor leaf = logits.detach().requires_grad_();
      const Tensor losses = cross_entropy(leaf, targets, options);
      expect_close(losses, expected.losses, 1e-12, 1e-12);
      losses.backward(mica::ones({40}, float64, device));
      expect_close(leaf.grad(), expected.dlogits, 1e-12, 1e-12);
    }
  }
}

TEST(CrossEntropyOptions, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor logits = randn({2, 3, 5}, float64, device);
    const Tensor labels = from_data<std::int64_t>({0, 4, -100, 2, 2, 1}, {2, 3}, device);
    const Tensor weight = rand({5}, float64, device) + 0.5;
    for (const Combination& c : combinations()) {
      const CrossEntropyOptions options{.reduction = c.reduction,
                                        .weight = c.weighted ? weight : Tensor{},
                                        .label_smoothing = c.smoothing,
                                        .logit_scale = c.scale,
                                        .softcap = c.softcap};
      SCOPED_TRACE(c.text());
      if (c.given) {
        const auto loss = [&](const Tensor& x, const Tensor& q) { return cross_entropy(x, q, options); };
        const Tensor q = rand({2, 3, 5}, float64, device);
        EXPECT_TRUE(autograd::gradcheck(loss, {logits, q}));
        EXPECT_TRUE(autograd::gradgradcheck(loss, {logits, q}));
      } else {
        const auto loss = [&](const Tensor& x) { return cross_entropy(x, labels, options); };
        EXPECT_TRUE(autograd::gradcheck(loss, {logits}));
        EXPECT_TRUE(autograd::gradgradcheck(loss, {logits}));
      }
    }
  }
}

TEST(CrossEntropyOptions, GradientsOfGradientsOfIgnoredRows) {
  const Tensor logits = randn({2, 4}, float64);
  logits.data<double>()[0] = std::numeric_limits<double>::quiet_NaN();
  const Tensor x = logits.requires_grad_();
  const Tensor loss = cross_entropy(x, from_data<std::int64_t>({-100, 2}), {.label_smoothing = 0.1, .softcap = 2});
  const Tensor dx = autograd::grad({loss}, {x}, {}, {.create_graph = true})[0];
  const std::vector<double> second = to_vector<double>(autograd::grad({sum(dx * dx)}, {x})[0]);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(second[i], 0);
    EXPECT_TRUE(std::isfinite(second[4 + i]));
  }
}

TEST(CrossEntropyOptions, ExtremeLogits) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      for (const std::int64_t n : {4, 600, 5000}) {
        std::vector<float> values(4 * n, -1e4f);
        values[1] = 1e4f;
        std::fill(values.begin() + n, values.begin() + 2 * n, 1e4f);                 // all equal
        std::fill(values.begin() + 2 * n, values.end(), static_cast<float>(-kInf));  // all masked except the label
        values[2 * n + 1] = 3;
        const Tensor logits = from_data(values, {4, n}, device).to(dtype);  // in row 3, all are masked
        const Tensor labels = from_data<std::int64_t>({1, 1, 1, 1}, device);
        for (const bool in_place : {false, true}) {
          const Tensor leaf = clone(logits).detach().requires_grad_();
          const Tensor losses = cross_entropy(in_place ? clone(leaf) : leaf, labels,
                                              {.reduction = Reduction::none, .in_place = in_place});
          const std::vector<double> loss = to_vector<double>(losses);
          EXPECT_EQ(loss[0], 0);
          EXPECT_NEAR(loss[1], std::log(static_cast<double>(n)), 1e-5);
          EXPECT_EQ(loss[2], 0);
          EXPECT_TRUE(std::isnan(loss[3]));
          losses.backward(ones({4}, float32, device));
          const std::vector<double> g = to_vector<double>(leaf.grad());
          for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(g[i], 0);
            ASSERT_NEAR(g[n + i], 1 / static_cast<double>(n) - (i == 1 ? 1 : 0), 4e-3);
            ASSERT_EQ(g[2 * n + i], 0);
            ASSERT_TRUE(std::isnan(g[3 * n + i]));
          }
        }

        // With label smoothing, each masked class has an infinite loss,
        const double smoothed =
            cross_entropy(slice(logits, 0, 2, 3), slice(labels, 0, 2, 3), {.label_smoothing = 0.1}).item();
        EXPECT_EQ(smoothed, kInf);
        // unless its weight is 0.
        std::vector<float> w(n, 0);
        w[1] = 1;
        const Tensor weight = from_data(w, {n}, device);
        const Tensor row = clone(slice(logits, 0, 2, 3)).detach().requires_grad_();
        const Tensor loss = cross_entropy(row, slice(labels, 0, 2, 3), {.weight = weight, .label_smoothing = 0.1});
        EXPECT_EQ(loss.item(), 0);
        loss.backward();
        for (const double g : to_vector<double>(row.grad())) {
          ASSERT_NEAR(g, 0, 1e-6);
        }
      }
    }
  }
}

TEST(CrossEntropyOptions, ZeroProbabilitiesOfInfiniteLogits) {
  for (const Device device : test_devices()) {
    const float inf = std::numeric_limits<float>::infinity();
    const Tensor logits = from_data({0.f, -inf, 0.f}, {1, 3}, device).requires_grad_();
    const Tensor q = from_data({0.5f, 0.f, 0.5f}, {1, 3}, device);
    const Tensor loss = cross_entropy(logits, q);
    EXPECT_NEAR(loss.item(), std::log(2.0), 1e-6);
    loss.backward();
    expect_close(logits.grad(), std::vector<double>{0, 0, 0}, 0, 1e-7);

    const Tensor none = zeros({0, 3}, float32, device);
    EXPECT_TRUE(std::isnan(cross_entropy(none, none).item()));
    EXPECT_EQ(cross_entropy(none, none, {.reduction = Reduction::sum}).item(), 0);
  }
}

TEST(CrossEntropyOptions, TotalWeightOfZero) {
  for (const Device device : test_devices()) {
    const Tensor logits = randn({2, 3}, float32, device);
    const Tensor labels = from_data<std::int64_t>({0, 0}, device);
    const Tensor weight = from_data({0.f, 1.f, 1.f}, device);
    EXPECT_TRUE(std::isnan(cross_entropy(logits, labels, {.weight = weight}).item()));
    EXPECT_EQ(cross_entropy(logits, labels, {.reduction = Reduction::sum, .weight = weight}).item(), 0);
  }
}

TEST(CrossEntropyOptions, RunsRepeatBitForBit) {
  const int before = num_threads();
  std::vector<Combination> some{{true, 0.1, 0.5, 8, false, Reduction::mean},
                                {false, 0, 1, 0, false, Reduction::sum},
                                {true, 0, 1, 0, true, Reduction::none}};
  for (const Device device : test_devices()) {
    for (const Combination& c : some) {
      for (const Shape& shape : std::vector<Shape>{{70, 100}, {5, 5003}, {3, 128'257}}) {
        for (const DType dtype : {float32, bfloat16}) {
          const Inputs in(c, shape, dtype, device);
          for (const bool in_place : {false, true}) {
            CrossEntropyOptions options = in.options;
            options.in_place = in_place;
            std::vector<std::vector<double>> losses, gradients;
            for (const int threads : {1, 2, 2}) {
              set_num_threads(threads);
              const Tensor leaf = clone(in.logits).detach().requires_grad_();
              const Tensor loss = cross_entropy(in_place ? clone(leaf) : leaf, in.targets, options);
              loss.backward(in.dloss);
              losses.push_back(to_vector<double>(loss));
              gradients.push_back(to_vector<double>(leaf.grad()));
            }
            EXPECT_TRUE(losses[0] == losses[1] && losses[1] == losses[2]) << c.text();
            EXPECT_TRUE(gradients[0] == gradients[1] && gradients[1] == gradients[2]) << c.text();
          }
        }
      }
    }
  }
  set_num_threads(before);
}

// Tests of in_place.

TEST(CrossEntropyInPlace, WritesTheGradientOverTheLogits) {
  for (const Device device : test_devices()) {
    for (const std::int64_t classes : {9, 3000}) {
      const Tensor w = randn({4, 6}, float32, device).requires_grad_();
      const Tensor x = randn({6, classes}, float32, device);
      const Tensor labels = randint(0, classes, {4}, int64, device);
      const Tensor expected = cross_entropy(matmul(w, x), labels);
      expected.backward();
      const Tensor dw = w.grad();
      w.set_grad({});

      const Tensor logits = matmul(w, x);
      const std::uint32_t version = logits.version();
      const Tensor loss = cross_entropy(logits, labels, {.in_place = true});
      EXPECT_GT(logits.version(), version);
      expect_close(loss, to_vector<double>(expected), 1e-6, 1e-6);
      const Tensor held = logits.detach();
      double sum_of_row = 0;
      for (const double g : to_vector<double>(slice(held, 0, 0, 1))) {
        sum_of_row += g;
      }
      EXPECT_NEAR(sum_of_row, 0, 1e-6);  // a gradient's rows sum to 0
      loss.backward();
      expect_close(w.grad(), dw, 1e-5, 1e-6);
    }
  }
}

TEST(CrossEntropyInPlace, KeepsTheLogitsWithoutAGradient) {
  const Tensor logits = randn({3, 5});
  const std::vector<float> before = to_vector<float>(logits);
  const Tensor labels = from_data<std::int64_t>({0, 1, 2});
  cross_entropy(logits, labels, {.in_place = true});
  EXPECT_EQ(to_vector<float>(logits), before);
  const Tensor leaf = logits.detach().requires_grad_();
  const autograd::NoGrad guard;
  cross_entropy(clone(leaf), labels, {.in_place = true});
  EXPECT_EQ(to_vector<float>(leaf), before);
}

TEST(CrossEntropyInPlace, Errors) {
  const Tensor labels = from_data<std::int64_t>({0, 1, 2});
  const Tensor leaf = randn({3, 5}).requires_grad_();
  const CrossEntropyOptions in_place{.in_place = true};
  const std::vector<float> before = to_vector<float>(leaf);

  expect_error(
      [&] { cross_entropy(leaf, labels, in_place); },
      "cross_entropy: in_place overwrites the logits with their gradient, but these, of shape [3, 5], are a leaf");
  EXPECT_EQ(to_vector<float>(leaf), before);
  expect_error([&] { cross_entropy(slice(leaf, 0, 0, 3), labels, in_place); }, "a leaf that requires a gradient");
  expect_error([&] { cross_entropy(slice(leaf, 0, 0, 2), slice(labels, 0, 0, 2), in_place); }, "or a view of one");
  expect_error([&] { cross_entropy(slice(clone(leaf), 1, 0, 4), labels, in_place); },
               "without gaps, got shape [3, 4] and strides [5, 1]; pass contiguous(logits), or turn it off");
  expect_error([&] { cross_entropy(leaf, labels, {.reduction = static_cast<Reduction>(9)}); },
               "cross_entropy: expected the reduction none, mean or sum, got 9");
  const Tensor tall = randn({5, 3}).requires_grad_();
  expect_error([&] { cross_entropy(transpose(clone(tall), 0, 1), labels, in_place); },
               "so they must be row-major without gaps, got shape");
  expect_error(
      [&] {
        cross_entropy(clone(leaf), rand({3, 5}).requires_grad_(), in_place);
      },
      "cross_entropy: expected probabilities that require no gradient for in_place");

  // If an op saved the logits, its backward detects that they were overwritten.
  {
    const Tensor y = exp(leaf);  // saves its result
    const Tensor loss = cross_entropy(y, labels, in_place);
    expect_error([&] { loss.backward(); }, "last by cross_entropy");
  }
  // A later use of the logits throws.
  {
    const Tensor logits = clone(leaf);
    const Tensor loss = cross_entropy(logits, labels, in_place);
    const Tensor later = sum(logits * 2);
    expect_error([&] { later.backward(); }, "cross_entropy: its logits were used after in_place overwrote them");
  }
  // So does backward after a write to the gradient.
  {
    const Tensor logits = clone(leaf);
    const Tensor loss = cross_entropy(logits, labels, in_place);
    logits.detach().bump_version("a test");
    expect_error([&] { loss.backward(); }, "modified in place since, last by a test");
  }
  // Backward can run only once.
  {
    const Tensor loss = cross_entropy(clone(leaf), labels, in_place);
    loss.backward({}, {.retain_graph = true});
    expect_error([&] { loss.backward(); }, "cross_entropy: with in_place, backward can run only once");
  }
  // There are no second derivatives, but backward may run while recording.
  {
    const Tensor loss = cross_entropy(clone(leaf), labels, in_place);
    const Tensor dx = autograd::grad({loss}, {leaf}, {}, {.create_graph = true})[0];
    expect_error(
        [&] { autograd::grad({sum(dx * dx)}, {leaf}); },
        "cross_entropy: with in_place there is no second derivative, since the logits are overwritten; turn it "
        "off, or instead of a model's loss() call cross_entropy(model(tokens), targets)");
  }
  // A label that is out of range throws before anything is written.
  {
    const Tensor logits = clone(leaf);
    expect_error([&] { cross_entropy(logits, from_data<std::int64_t>({0, 1, 9}), in_place); }, "got 9 in row 2");
    EXPECT_EQ(to_vector<float>(logits.detach()), before);
  }
}

TEST(CrossEntropyInPlace, OfAView) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 1300}, float64, device).requires_grad_();
    const Tensor labels = randint(0, 1300, {6}, int64, device);
    cross_entropy(reshape(x, {6, 1300}), labels).backward();
    const Tensor expected = x.grad();
    x.set_grad({});
    const Tensor logits = x * 1;
    const Tensor loss = cross_entropy(reshape(logits, {6, 1300}), labels, {.in_place = true});
    loss.backward({}, {.retain_graph = true});
    expect_close(x.grad(), expected, 1e-12, 1e-15);
    // If the logits are a view, their base was overwritten, too.
    expect_error([&] { sum(logits).backward(); }, "cross_entropy: its logits were used after in_place");
  }
}

TEST(CrossEntropyInPlace, SeveralLossesOfOneGraph) {
  // The op that produced the logits gets the gradient of both their uses.
  const Tensor w = randn({4, 7}, float64).requires_grad_();
  const Tensor labels = from_data<std::int64_t>({0, 1, 2, 3});
  const auto run = [&](bool in_place) {
    w.set_grad({});
    const Tensor logits = w * 2;
    const Tensor other = sum(logits);
    (cross_entropy(logits, labels, {.in_place = in_place}) * 3 + other).backward();
    return w.grad();
  };
  const Tensor expected = run(false);
  expect_close(run(true), expected, 1e-12, 1e-12);
}

TEST(CrossEntropyOptions, LabelsOutOfRangeOnCuda) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Device device = Device::cuda();
  for (const std::int64_t n : {5, 5000}) {
    for (const double smoothing : {0.0, 0.1}) {
      const Tensor weight = rand({n}, float32, device);
      const Tensor leaf = randn({3, n}, float32, device).requires_grad_();
      const Tensor labels = from_data<std::int64_t>({0, n + (std::int64_t{1} << 40), -1}, device);
      for (const bool in_place : {false, true}) {
        leaf.set_grad({});
        const Tensor losses = cross_entropy(
            in_place ? clone(leaf) : leaf, labels,
            {.reduction = Reduction::none, .weight = weight, .label_smoothing = smoothing, .in_place = in_place});
        const std::vector<float> values = to_vector<float>(losses);
        EXPECT_TRUE(std::isfinite(values[0]) && std::isnan(values[1]) && std::isnan(values[2]));
        losses.backward(ones({3}, float32, device));
        const std::vector<float> g = to_vector<float>(leaf.grad());
        for (std::int64_t i = 0; i < n; ++i) {
          ASSERT_TRUE(std::isfinite(g[i]) && std::isnan(g[n + i]) && std::isnan(g[2 * n + i]));
        }
        EXPECT_TRUE(std::isnan(cross_entropy(leaf, labels, {.weight = weight}).item()));
      }
    }
  }
}

TEST(CrossEntropyOptions, MoreThan2To31ElementsOnCuda) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  constexpr std::int64_t kClasses = 50'304;
  constexpr std::int64_t kRows = 43'000;  // 2.16e9 elements
  try {
    const Device device = Device::cuda();
    const Tensor leaf = zeros({kRows, kClasses}, bfloat16, device).requires_grad_();
    const Tensor last = slice(leaf.detach(), 0, kRows - 1, kRows);
    const Tensor values = randn({1, kClasses}, bfloat16, device);
    copy_into(last, values);
    const Tensor labels = full({kRows}, 7, int64, device);
    for (const bool in_place : {false, true}) {
      const Tensor logits = in_place ? clone(leaf) : leaf;
      const Tensor losses = cross_entropy(logits, labels, {.reduction = Reduction::none, .in_place = in_place});
      losses.backward(ones({kRows}, float32, device));
      const Reference expected =
          reference(values, full({1}, 7, int64), {.reduction = Reduction::none}, std::vector<double>{1});
      expect_close(slice(losses.detach(), 0, kRows - 1, kRows), expected.losses, 1e-2, 1e-2);
      expect_rows_close(slice(leaf.grad(), 0, kRows - 1, kRows), expected.dlogits, expected.scales, 1, 5e-3,
                        "last row");
      const Tensor before = slice(leaf.grad(), 0, kRows - 2, kRows - 1);
      EXPECT_NEAR(to_vector<double>(before)[0], 1.0 / kClasses, 1e-7);
      leaf.set_grad({});
    }
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

TEST(CrossEntropyOptions, Errors) {
  const Tensor logits = randn({3, 5});
  const Tensor labels = zeros({3}, int64);
  const auto refuses = [&](const CrossEntropyOptions& options, const std::string& text) {
    expect_error([&] { cross_entropy(logits, labels, options); }, text);
  };
  refuses({.weight = ones({4})}, "cross_entropy: expected weight of shape [5], got [4]");
  refuses({.weight = ones({5}, float64)}, "cross_entropy: expected weight of float32 or float32, got float64");
  refuses({.weight = ones({5}).requires_grad_()}, "cross_entropy: expected weight that requires no gradient");
  refuses({.label_smoothing = 1.5}, "cross_entropy: expected label_smoothing in [0, 1], got 1.5");
  refuses({.label_smoothing = -0.1}, "cross_entropy: expected label_smoothing in [0, 1]");
  refuses({.softcap = -1}, "cross_entropy: expected a finite softcap of at least 0, got -1");
  refuses({.logit_scale = kInf}, "cross_entropy: expected a finite logit_scale, got inf");
  expect_error(
      [&] {
        cross_entropy(logits, rand({3, 4}));
      },
      "or probabilities of the logits' dtype and shape, float32 [3, 5], got float32 [3, 4]");
  expect_error([&] { cross_entropy(zeros({3, 0}), labels); }, "cross_entropy: expected at least one class");
}

}  // namespace cross_entropy_options_test
