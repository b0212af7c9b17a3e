#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/loss/loss.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace loss_test {

using Values = std::vector<double>;

Tensor uniform(const Shape& shape, double low, double high, DType dtype, Device device) {
  return (rand(shape, float64, device) * (high - low) + low).to(dtype);
}

struct LossCase {
  const char* name;
  std::function<Tensor(const Tensor&, const Tensor&, Reduction)> loss;
  std::function<double(double, double)> reference;
};

const LossCase kLosses[] = {
    {"mse_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return mse_loss(x, t, r); },
     [](double x, double t) { return (x - t) * (x - t); }},
    {"l1_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return l1_loss(x, t, r); },
     [](double x, double t) { return std::abs(x - t); }},
    {"huber_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return huber_loss(x, t, 0.4, r); },
     [](double x, double t) {
       const double d = std::abs(x - t);
       return d <= 0.4 ? d * d / 2 : 0.4 * (d - 0.2);
     }},
    {"smooth_l1_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return smooth_l1_loss(x, t, 0.4, r); },
     [](double x, double t) {
       const double d = std::abs(x - t);
       return d < 0.4 ? d * d / 0.8 : d - 0.2;
     }},
    {"poisson_nll_loss",
     [](const Tensor& x, const Tensor& t, Reduction r) { return poisson_nll_loss(x, t, {.reduction = r}); },
     [](double x, double t) { return std::exp(x) - t * x; }},
    {"gaussian_nll_loss",
     [](const Tensor& x, const Tensor& t, Reduction r) {
       return gaussian_nll_loss(x, t, t, {.full = true, .reduction = r});
     },
     [](double x, double t) { return 0.5 * (std::log(t) + (x - t) * (x - t) / t + std::log(2 * M_PI)); }},
    {"soft_margin_loss", [](const Tensor& x, const Tensor& t, Reduction r) { return soft_margin_loss(x, t, r); },
     [](double x, double t) { return std::log1p(std::exp(-t * x)); }},
    {"bce_with_logits",
     [](const Tensor& x, const Tensor& t, Reduction r) { return bce_with_logits(x, t, {.reduction = r}); },
     [](double x, double t) {
       return -t * std::log(1 / (1 + std::exp(-x))) - (1 - t) * std::log(1 / (1 + std::exp(x)));
     }},
    {"kl_div", [](const Tensor& x, const Tensor& t, Reduction r) { return kl_div(x, t, false, r); },
     [](double x, double t) { return t * (std::log(t) - x); }},
    {"kl_div, log_target", [](const Tensor& x, const Tensor& t, Reduction r) { return kl_div(x, t, true, r); },
     [](double x, double t) { return std::exp(t) * (t - x); }},
};

TEST(Loss, MatchesReference) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x = uniform({5, 7}, -3, 3, dtype, device);
      const Tensor target = uniform({5, 7}, 0.1, 0.9, dtype, device);
      const Values a = to_vector<double>(x), b = to_vector<double>(target);
      for (const LossCase& c : kLosses) {
        Values losses;
        double total = 0;
        for (std::size_t i = 0; i < a.size(); ++i) {
          losses.push_back(c.reference(a[i], b[i]));
          total += losses.back();
        }
        const double tolerance = dtype == float64 ? 1e-14 : 8 * epsilon_of(dtype);
        expect_close(c.loss(x, target, Reduction::none), losses, tolerance, tolerance, c.name);
        expect_close(c.loss(x, target, Reduction::sum), Values{total}, tolerance, 8 * tolerance, c.name);
        expect_close(c.loss(x, target, Reduction::mean), Values{total / 35}, tolerance, tolerance, c.name);
      }
    }
  }
}

TEST(Loss, Gradients) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor x = uniform({3, 4}, -3, 3, float64, device);
    const Tensor target = uniform({3, 4}, 0.1, 0.9, float64, device);
    for (const LossCase& c : kLosses) {
      SCOPED_TRACE(c.name);
      for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
        const auto loss = [&](const Tensor& a, const Tensor& b) { return c.loss(a, b, reduction); };
        EXPECT_TRUE(autograd::gradcheck(loss, {x, target}));
        EXPECT_TRUE(autograd::gradgradcheck(loss, {x, target}));
      }
    }
  }
}

TEST(Loss, BceWithWeights) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor x = uniform({2, 3}, -2, 2, float64, device);
    const Tensor t = uniform({2, 3}, 0, 1, float64, device);
    const Tensor weight = uniform({3}, 0.5, 2, float64, device), pos_weight = uniform({3}, 0.5, 2, float64, device);
    const Values xs = to_vector<double>(x), ts = to_vector<double>(t), ws = to_vector<double>(weight),
                 ps = to_vector<double>(pos_weight);
    Values expected;
    for (std::size_t i = 0; i < xs.size(); ++i) {
      const double s = 1 / (1 + std::exp(-xs[i]));
      expected.push_back(-ws[i % 3] * (ps[i % 3] * ts[i] * std::log(s) + (1 - ts[i]) * std::log(1 - s)));
    }
    const BceOptions options{.weight = weight, .pos_weight = pos_weight, .reduction = Reduction::none};
    expect_close(bce_with_logits(x, t, options), expected, 1e-13, 1e-13);
    const auto loss = [&](const Tensor& a, const Tensor& b) { return bce_with_logits(a, b, options); };
    EXPECT_TRUE(autograd::gradcheck(loss, {x, t}));
    EXPECT_TRUE(autograd::gradgradcheck(loss, {x, t}));
  }
}

// Losses of rows, whose values the conformance tests compare with PyTorch.
TEST(Loss, OfRows) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor a = randn({4, 3}, float64, device), b = randn({4, 3}, float64, device);
    const Tensor c = randn({4, 3}, float64, device);
    const Tensor signs = from_data({1.0, -1.0, -1.0, 1.0}, device);
    const auto triplet = [](const Tensor& x, const Tensor& y, const Tensor& z) {
      return triplet_margin_loss(x, y, z, {.margin = 2, .swap = true, .reduction = Reduction::none});
    };
    EXPECT_TRUE(autograd::gradcheck(triplet, {a, b, c}));
    EXPECT_TRUE(autograd::gradgradcheck(triplet, {a, b, c}));
    const auto cosine = [&](const Tensor& x, const Tensor& y) { return cosine_embedding_loss(x, y, signs, -0.9); };
    EXPECT_TRUE(autograd::gradcheck(cosine, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck(cosine, {a, b}));
    const auto labels = [&](const Tensor& x, const Tensor& y) { return multilabel_soft_margin_loss(x, y); };
    EXPECT_TRUE(autograd::gradgradcheck(labels, {a, sigmoid(b)}));
    // The variance has one value a row; below eps it counts as eps, but still gets a gradient.
    const Tensor variance = from_data({0.5, 1.0, 2.0, 0.0}, device).requires_grad_();
    const Tensor likelihood = gaussian_nll_loss(a, b, variance, {.eps = 0.1, .reduction = Reduction::none});
    const Tensor expanded = expand(reshape(maximum(variance.detach(), 0.1), {4, 1}), {4, 3});
    expect_close(likelihood, gaussian_nll_loss(a, b, expanded, {.eps = 0.1, .reduction = Reduction::none}), 1e-14, 0);
    sum(likelihood).backward();
    EXPECT_NE(to_vector<double>(variance.grad())[3], 0);
    const Tensor x = from_data({1.0, -2.0, 0.5, 3.0}, device);
    expect_close(hinge_embedding_loss(x, signs, 1, Reduction::none), Values{1, 3, 0.5, 3}, 0, 0);
    expect_close(margin_ranking_loss(x, neg(x), signs, 0.5, Reduction::none), Values{0, 0, 1.5, 0}, 0, 0);
    expect_error([&] { cosine_embedding_loss(a, b, a); }, "cosine_embedding_loss: expected a target of shape [4]");
    expect_error([&] { triplet_margin_loss(a, b, x); }, "triplet_margin_loss: expected a target of shape [4, 3]");
    expect_error([&] { gaussian_nll_loss(a, b, ones({3}, float64, device)); },
                 "gaussian_nll_loss: expected var of shape");
    expect_error([&] { gaussian_nll_loss(a, b, a, {.eps = 0}); }, "gaussian_nll_loss: expected eps");
    expect_error([&] { smooth_l1_loss(a, b, -1); }, "smooth_l1_loss: expected beta");
    if (device.is_cpu()) {
      expect_error([&] { gaussian_nll_loss(a, b, full_like(a, -1)); }, "variances that are not negative, got -1");
    }
  }
}

TEST(Loss, ExtremeValues) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      const Tensor x = from_data({1000.0, -1000.0, 1000.0, -1000.0, 30.0}).to(device, dtype).requires_grad_();
      const Tensor t = from_data({1.0, 1.0, 0.0, 0.0, 1.0}).to(device, dtype);
      const Tensor losses = bce_with_logits(x, t, {.reduction = Reduction::none});
      expect_close(losses, Values{0, 1000, 1000, 0, std::log1p(std::exp(-30.0))}, 1e-6, 0);
      losses.backward(ones_like(losses));
      expect_close(x.grad(), Values{0, -1, 1, 0, 0}, 0, 1e-12);
      // 0 · log 0 counts as 0.
      expect_close(kl_div(from_data({-1.0, -kInfinity}).to(device, dtype), from_data({0.0, 0.5}).to(device, dtype),
                          false, Reduction::none),
                   Values{0, kInfinity}, 0, 0);
    }
    EXPECT_TRUE(std::isnan(mse_loss(empty({0}, float32, device), empty({0}, float32, device)).item()));
    EXPECT_EQ(mse_loss(empty({0}, float32, device), empty({0}, float32, device), Reduction::sum).item(), 0);
  }
}

// Values and gradients at infinite predictions, at targets of exactly 0 and 1, and in the far tails.
TEST(Loss, InfinitiesAndTails) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Case {
    const char* name;
    std::function<Tensor(const Tensor&, const Tensor&)> loss;
    double x, target, value, dx, dtarget;  // NaN for a dtarget that is not checked
  };
  const auto bce = [](const Tensor& x, const Tensor& t) {
    return bce_with_logits(x, t, {.reduction = Reduction::none});
  };
  const auto weighted_bce = [](const Tensor& x, const Tensor& t) {
    return bce_with_logits(x, t,
                           {.weight = full_like(x, 0), .pos_weight = full_like(x, 2), .reduction = Reduction::none});
  };
  const auto positive_bce = [](const Tensor& x, const Tensor& t) {
    return bce_with_logits(x, t, {.pos_weight = full_like(x, 2), .reduction = Reduction::none});
  };
  const auto huber = [](const Tensor& x, const Tensor& t) { return huber_loss(x, t, 0.5, Reduction::none); };
  const auto l1 = [](const Tensor& x, const Tensor& t) { return l1_loss(x, t, Reduction::none); };
  const auto mse = [](const Tensor& x, const Tensor& t) { return mse_loss(x, t, Reduction::none); };
  const auto kl = [](const Tensor& x, const Tensor& t) { return kl_div(x, t, false, Reduction::none); };
  const auto log_kl = [](const Tensor& x, const Tensor& t) { return kl_div(x, t, true, Reduction::none); };
  const double tail = std::log1p(std::exp(-20.0)), slope = 1 / (1 + std::exp(20.0));
  const Case cases[] = {
      {"bce", bce, -kInfinity, 0, 0, 0, NAN},
      {"bce", bce, kInfinity, 1, 0, 0, NAN},
      {"bce", bce, kInfinity, 0, kInfinity, 1, NAN},
      {"bce", bce, -kInfinity, 1, kInfinity, -1, NAN},
      {"bce", bce, kInfinity, 0.25, kInfinity, 0.75, NAN},
      {"bce", bce, -kInfinity, 0.25, kInfinity, -0.25, NAN},
      {"bce", bce, 20, 1, tail, -slope, -20},
      {"bce", bce, -20, 0, tail, slope, 20},
      {"bce", bce, 20, 0, 20 + tail, 1 - slope, -20},
      {"bce", bce, -80, 0, std::exp(-80.0), std::exp(-80.0), 80},
      {"bce, pos_weight", positive_bce, -kInfinity, 0, 0, 0, NAN},
      {"bce, pos_weight", positive_bce, kInfinity, 1, 0, 0, NAN},
      {"bce, pos_weight", positive_bce, -kInfinity, 1, kInfinity, -2, NAN},
      {"bce, pos_weight", positive_bce, 20, 1, 2 * tail, -2 * slope, tail - 20},
      {"bce, weight 0", weighted_bce, kInfinity, 0, 0, 0, NAN},
      {"huber", huber, kInfinity, 0, kInfinity, 0.5, -0.5},
      {"huber", huber, -1e30, 0, 5e29, -0.5, 0.5},
      {"huber", huber, 0, kInfinity, kInfinity, -0.5, 0.5},
      {"huber", huber, 1, 1, 0, 0, 0},
      {"l1", l1, -kInfinity, 0, kInfinity, -1, 1},
      {"l1", l1, 1, 1, 0, 0, 0},
      {"mse", mse, kInfinity, 0, kInfinity, kInfinity, -kInfinity},
      {"mse", mse, 1, 1, 0, 0, 0},
      {"kl", kl, -kInfinity, 0, 0, 0, 0},
      {"kl", kl, -kInfinity, 0.5, kInfinity, -0.5, NAN},
      {"kl", kl, -2, 0, 0, 0, 0},
      {"kl", kl, -2, 1, 2, -1, 3},
      {"kl, log_target", log_kl, -kInfinity, -kInfinity, 0, 0, 0},
      {"kl, log_target", log_kl, -2, -kInfinity, 0, 0, 0},
      {"kl, log_target", log_kl, -kInfinity, 0, kInfinity, -1, NAN},
  };
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      const double tolerance = dtype == float64 ? 1e-14 : 4 * epsilon_of(dtype);
      for (const Case& c : cases) {
        SCOPED_TRACE(fmt::format("{} of {} and {} in {}", c.name, c.x, c.target, dtype));
        const Tensor x = full({1}, c.x, dtype, device).requires_grad_();
        const Tensor t = full({1}, c.target, dtype, device).requires_grad_();
        c.loss(x, t).backward();
        expect_close(c.loss(x, t), Values{c.value}, tolerance, 0, "loss");
        expect_close(x.grad(), Values{c.dx}, tolerance, 0, "dx");
        if (!std::isnan(c.dtarget)) {
          expect_close(t.grad(), Values{c.dtarget}, tolerance, 0, "dtarget");
        }
      }
    }
    // A target that is no probability, and one that is not a number.
    expect_close(kl(full({2}, -1, float64, device), from_data<double>({-0.5, NAN}, device)), Values{NAN, NAN}, 0, 0);
    expect_close(bce(from_data<double>({0.0, NAN}, device), from_data<double>({NAN, 1.0}, device)), Values{NAN, NAN}, 0,
                 0);
  }
}

TEST(Loss, AutocastComputesInFloat32) {
  for (const Device device : test_devices()) {
    const autograd::Autocast guard(bfloat16);
    const Tensor x = full({3}, 1.5, bfloat16, device), t = full({3}, 0.5, bfloat16, device);
    EXPECT_EQ(mse_loss(x, t).dtype(), float32);
    EXPECT_EQ(bce_with_logits(x, t).dtype(), float32);
  }
}

TEST(Loss, Errors) {
  const Tensor x = ones({2, 3});
  expect_error([&] { mse_loss(x, ones({3})); }, "mse_loss: expected a target of shape [2, 3], got [3]");
  expect_error([&] { l1_loss(x, ones({2, 3}, float64)); }, "l1_loss: expected a target of float32, got float64");
  expect_error([&] { kl_div(ones({2}, int64), ones({2}, int64)); }, "kl_div: expected a floating dtype, got int64");
  expect_error([&] { huber_loss(x, x, 0); }, "huber_loss: expected delta > 0, got 0");
  expect_error([&] { huber_loss(x, x, std::nan("")); }, "huber_loss: expected delta > 0");
  expect_error([&] { mse_loss(x, x, static_cast<Reduction>(9)); },
               "mse_loss: expected the reduction none, mean or sum");
  expect_error(
      [&] {
        bce_with_logits(x, x, {.weight = ones({4, 2, 3})});
      },
      "bce_with_logits: expected a weight that broadcasts to [2, 3], got [4, 2, 3]");
  expect_error([&] { bce_with_logits(x, x, {.pos_weight = ones({2})}); },
               "bce_with_logits: shapes [2, 3] and [2] do not broadcast");
  expect_error([&] { bce_with_logits(x, x, {.pos_weight = ones({3}, float64)}); },
               "bce_with_logits: expected a pos_weight of float32, got float64");
  expect_error([&] { mse_loss(x, Tensor{}); }, "undefined");
}

TEST(NllLoss, IsItsDefinition) {
  manual_seed(8);
  for (const Device device : test_devices()) {
    const Tensor x = log_softmax(randn({2, 4, 5}, float64), -1).to(device);
    const Tensor targets = from_data<std::int64_t>({0, 4, -100, 2, 3, 3, -100, 1}, {2, 4}, device);
    const Tensor weight = from_data({0.5, 1.0, 0.0, 2.0, 3.0}, device);
    const std::vector<double> values = to_vector<double>(x), w = to_vector<double>(weight);
    const std::vector<std::int64_t> t = to_vector<std::int64_t>(targets);
    std::vector<double> losses, weighted;
    double total = 0, weights = 0;
    for (std::size_t i = 0; i < t.size(); ++i) {
      const std::size_t label = static_cast<std::size_t>(t[i]);
      losses.push_back(t[i] < 0 ? 0 : -values[i * 5 + label]);
      weighted.push_back(t[i] < 0 ? 0 : losses.back() * w[label]);
      total += weighted.back();
      weights += t[i] < 0 ? 0 : w[label];
    }
    expect_close(nll_loss(x, targets, {.reduction = Reduction::none}), losses, 1e-14, 0);
    expect_close(nll_loss(x, targets.to(int32), {.weight = weight, .reduction = Reduction::none}), weighted, 1e-14, 0);
    expect_close(nll_loss(x, targets, {.weight = weight, .reduction = Reduction::sum}), Values{total}, 1e-14, 0);
    expect_close(nll_loss(x, targets, {.weight = weight}), Values{total / weights}, 1e-14, 0);
    expect_close(nll_loss(x.to(bfloat16), targets, {.weight = weight.to(bfloat16)}), Values{total / weights}, 2e-2, 0);
    EXPECT_EQ(nll_loss(x.to(float16), targets).dtype(), float16);
    // The same as cross_entropy() computes from logits.
    expect_close(nll_loss(x, targets, {.weight = weight}), cross_entropy(x, targets, {.weight = weight}), 1e-12, 0);
    const auto f = [&](const Tensor& logits) { return nll_loss(log_softmax(logits, -1), targets, {.weight = weight}); };
    EXPECT_TRUE(autograd::gradcheck(f, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
    // A class of weight 0 contributes nothing, even if x is −∞.
    const Tensor none = from_data({-std::numeric_limits<double>::infinity(), 0.0}, {1, 2}, device);
    expect_close(nll_loss(none, zeros({1}, int64, device),
                          {.weight = from_data({0.0, 1.0}, device), .reduction = Reduction::sum}),
                 Values{0}, 0, 0);
    expect_close(nll_loss(none, full({1}, -100, int64, device)), Values{NAN}, 0, 0);
    if (device.is_cpu()) {
      expect_error([&] { nll_loss(none, full({1}, 2, int64)); }, "nll_loss: index 2 is out of range");
    } else {
      expect_close(nll_loss(none, full({1}, 2, int64, device)), Values{NAN}, 0, 0);
    }
  }
}

TEST(NllLoss, Errors) {
  const Tensor x = ones({2, 3});
  expect_error([&] { nll_loss(x, zeros({2, 1}, int64)); }, "nll_loss: expected targets of shape [2], got [2, 1]");
  expect_error([&] { nll_loss(x, zeros({2})); }, "nll_loss: expected targets of int64 or int32, got float32");
  expect_error([&] { nll_loss(x.to(int64), zeros({2}, int64)); }, "nll_loss: expected a floating dtype");
  expect_error([&] { nll_loss(x, zeros({2}, int64), {.weight = ones({2})}); },
               "nll_loss: expected a weight of shape [3]");
}

}  // namespace loss_test
