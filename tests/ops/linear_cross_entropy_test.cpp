#include <gtest/gtest.h>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/cross_entropy/linear_cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace linear_cross_entropy_test {

Tensor some_labels(const Shape& rows, std::int64_t classes, Device device) {
  const Tensor labels = randint(0, classes, rows, int64);
  for (std::int64_t i = 2; i < labels.numel(); i += 7) {
    labels.data<std::int64_t>()[i] = -100;
  }
  return labels.to(device);
}

struct Result {
  Tensor loss, dx, dweight;
};

Result run(const std::function<Tensor(const Tensor&, const Tensor&)>& f, const Tensor& x, const Tensor& weight,
           const Tensor& dloss) {
  const Tensor a = x.detach().requires_grad_();
  const Tensor b = weight.detach().requires_grad_();
  const Tensor loss = f(a, b);
  loss.backward(dloss);
  return {loss.detach(), a.grad(), b.grad()};
}

TEST(LinearCrossEntropy, MatchesLinearAndCrossEntropy) {
  manual_seed(4);  // some float16 gradients are so small that their rounding depends on the numbers
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const double tolerance = dtype == float64 ? 1e-11 : dtype == float32 ? 2e-5 : dtype == float16 ? 1e-2 : 5e-2;
      for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
        for (const std::int64_t classes : {11, 1037}) {
          const Tensor x = randn({5, 27, 8}, dtype, device);
          const Tensor weight = randn({classes, 8}, dtype, device);
          const Tensor labels = some_labels({5, 27}, classes, device);
          const CrossEntropyOptions options{.reduction = reduction,
                                            .weight = (rand({classes}, float32) + 0.5).to(dtype).to(device),
                                            .label_smoothing = 0.1,
                                            .softcap = 10};
          // float16 needs a loss scale, since the gradients of a mean would be below its smallest normal number.
          const double loss_scale = dtype == float16 ? 128 : 1;
          const Shape rows = reduction == Reduction::none ? Shape{5, 27} : Shape{};
          const Tensor dloss = randn(rows, accumulate_dtype(dtype), device) * loss_scale;
          const Result pair =
              run([&](const Tensor& a, const Tensor& w) { return cross_entropy(linear(a, w), labels, options); }, x,
                  weight, dloss);
          // A single chunk; several chunks with a shorter last one; one chunk per row.
          for (const std::int64_t chunk :
               {std::int64_t{1} << 29, classes * 100 * std::int64_t(size_of(dtype)), std::int64_t{1}}) {
            const Result chunked = run(
                [&](const Tensor& a, const Tensor& w) { return linear_cross_entropy(a, w, labels, options, chunk); }, x,
                weight, dloss);
            const std::string what = fmt::format("{} classes {} chunk {}", name_of(dtype), classes, chunk);
            expect_close(chunked.loss, pair.loss, tolerance, tolerance, what);
            expect_rows_close(chunked.dx, to_vector<double>(pair.dx), 8, tolerance, what + " dx");
            expect_rows_close(chunked.dweight, to_vector<double>(pair.dweight), 8, tolerance, what + " dweight");
          }
        }
      }
    }
  }
}

// Most gradients of a mean are below 2⁻¹⁴, float16's smallest normal number, where few digits remain. A loss scale must
// be applied before they are rounded.
TEST(LinearCrossEntropy, LossScaleReachesTheSmallGradientsOfFloat16) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({600, 8}, float16, device), weight = randn({1037, 8}, float16, device) * 0.25;
    const Tensor labels = some_labels({600}, 1037, device);
    const auto gradients = [&](DType dtype, Reduction reduction) {
      const auto loss = [&](const Tensor& a, const Tensor& w) {
        return linear_cross_entropy(a, w, labels, {.reduction = reduction}, 1037 * 100 * 2);
      };
      return run(loss, x.to(dtype), weight.to(dtype), full({}, 4096, accumulate_dtype(dtype), device));
    };
    for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
      const Result got = gradients(float16, reduction), exact = gradients(float64, reduction);
      // Logits and their gradients are rounded, with relative errors of up to 2⁻¹¹. In sums of hundreds of terms, that
      // makes a few times as much.
      expect_rows_close(got.dx, to_vector<double>(exact.dx), 8, 0x1p-7, "dx");
      expect_rows_close(got.dweight, to_vector<double>(exact.dweight), 8, 0x1p-7, "dweight");
    }
  }
}

TEST(LinearCrossEntropy, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 4}, float64, device);
    const Tensor weight = randn({5, 4}, float64, device);
    const Tensor labels = from_data<std::int64_t>({0, 4, -100, 2, 2, 1}, {2, 3}, device);
    const Tensor given = rand({2, 3, 5}, float64, device);
    for (const Reduction reduction : {Reduction::none, Reduction::mean, Reduction::sum}) {
      for (const Tensor& targets : {labels, given}) {
        const auto loss = [&](const Tensor& a, const Tensor& w) {
          return linear_cross_entropy(a, w, targets, {.reduction = reduction, .label_smoothing = 0.1, .softcap = 3},
                                      2 * 5 * 8);
        };
        EXPECT_TRUE(autograd::gradcheck(loss, {x, weight}));
        EXPECT_TRUE(autograd::gradgradcheck(loss, {x, weight}));
      }
    }
  }
}

TEST(LinearCrossEntropy, OneGradientOnly) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({6, 4}, float64, device);
    const Tensor weight = randn({5, 4}, float64, device);
    const Tensor labels = some_labels({6}, 5, device);
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      EXPECT_TRUE(autograd::gradcheck(
          [&](const Tensor& a) { return linear_cross_entropy(a, weight, labels, {.reduction = reduction}, 80); }, {x}));
      EXPECT_TRUE(autograd::gradcheck(
          [&](const Tensor& w) { return linear_cross_entropy(x, w, labels, {.reduction = reduction}, 80); }, {weight}));
    }
  }
}

TEST(LinearCrossEntropy, BackwardRunsAgainAndRepeatsBitForBit) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({300, 16}, bfloat16, device).requires_grad_();
    const Tensor weight = randn({1500, 16}, bfloat16, device).requires_grad_();
    const Tensor labels = some_labels({300}, 1500, device);
    std::vector<std::vector<float>> all;
    for (int i = 0; i < 2; ++i) {
      const Tensor loss = linear_cross_entropy(x, weight, labels, {}, 1500 * 2 * 128);
      for (int j = 0; j < 2; ++j) {
        x.set_grad({});
        weight.set_grad({});
        loss.backward({}, {.retain_graph = true});
        std::vector<float> found = to_vector<float>(x.grad());
        const std::vector<float> dweight = to_vector<float>(weight.grad());
        found.insert(found.end(), dweight.begin(), dweight.end());
        all.push_back(found);
      }
    }
    EXPECT_TRUE(all[0] == all[1] && all[1] == all[2] && all[2] == all[3]);
  }
}

TEST(LinearCrossEntropy, EmptyAndStridedInputs) {
  for (const Device device : test_devices()) {
    const Tensor weight = randn({5, 4}, float32, device).requires_grad_();
    const Tensor none = zeros({0, 4}, float32, device).requires_grad_();
    EXPECT_TRUE(std::isnan(linear_cross_entropy(none, weight, zeros({0}, int64, device)).item()));
    const Tensor sum = linear_cross_entropy(none, weight, zeros({0}, int64, device), {.reduction = Reduction::sum});
    EXPECT_EQ(sum.item(), 0);
    sum.backward();
    expect_close(weight.grad(), std::vector<double>(20, 0), 0, 0);
    EXPECT_EQ(none.grad().shape(), Shape({0, 4}));

    const Tensor flat = zeros({3, 0}, float32, device);
    const Tensor narrow = zeros({5, 0}, float32, device);
    const Tensor uniform = linear_cross_entropy(flat, narrow, zeros({3}, int64, device));
    EXPECT_NEAR(uniform.item(), std::log(5.0), 1e-6);

    const Tensor x = transpose(randn({4, 6}, float32, device), 0, 1);
    const Tensor w = transpose(randn({4, 5}, float32, device), 0, 1);
    const Tensor labels = some_labels({6}, 5, device);
    EXPECT_NEAR(linear_cross_entropy(x, w, labels, {}, 40).item(), cross_entropy(linear(x, w), labels).item(), 1e-5);
  }
}

TEST(LinearCrossEntropy, Errors) {
  const Tensor x = randn({3, 4});
  const Tensor weight = randn({5, 4});
  const Tensor labels = zeros({3}, int64);
  expect_error(
      [&] {
        linear_cross_entropy(x, randn({5, 3}), labels);
      },
      "linear_cross_entropy: expected x of shape (…, 3), got [3, 4]");
  expect_error(
      [&] {
        linear_cross_entropy(x, randn({5, 4}, float64), labels);
      },
      "linear_cross_entropy: expected x and weight of one floating dtype, got float32 and float64");
  expect_error([&] { linear_cross_entropy(x, weight, zeros({4}, int64)); },
               "linear_cross_entropy: expected targets of shape [3] for logits of shape [3, 5], got [4]");
  expect_error([&] { linear_cross_entropy(x, weight, labels, {.in_place = true}); },
               "linear_cross_entropy: expected in_place to be off");
  expect_error([&] { linear_cross_entropy(x, weight, labels, {}, 0); }, "expected chunk_bytes of at least 1, got 0");
  expect_error(
      [&] {
        linear_cross_entropy(x, weight, from_data<std::int64_t>({0, 1, 5}), {}, 1);
      },
      "linear_cross_entropy: expected targets in [0, 5) or ignore_index -100, got 5 in row 2");
  expect_error(
      [&] {
        linear_cross_entropy(x, weight, rand({3, 5}).requires_grad_());
      },
      "linear_cross_entropy: expected probabilities that require no gradient");
}

}  // namespace linear_cross_entropy_test
