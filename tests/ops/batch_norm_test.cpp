#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/batch_norm/batch_norm.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/channels_last.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace batch_norm_test {

struct Inputs {
  Tensor x;
  Tensor weight;
  Tensor bias;
  Tensor residual;
  Tensor dy;
};

struct Form {
  bool training = true;
  bool relu = false;
  bool residual = false;
  bool affine = true;
};

struct Results {
  Tensor y;
  Tensor dx;
  Tensor dweight;
  Tensor dbias;
  Tensor dresidual;
  Tensor running_mean;
  Tensor running_var;
};

Inputs random_inputs(const Shape& shape, DType dtype, DType weight_dtype, Device device, bool last) {
  const auto image = [&](double shift) {
    const Tensor x = (randn(shape, float64) * 2 + shift).to(dtype).to(device);
    return last ? channels_last(x) : x;
  };
  const auto channel = [&] { return randn({shape[1]}, float64).to(weight_dtype).to(device); };
  return {.x = image(3), .weight = channel(), .bias = channel(), .residual = image(0), .dy = image(0.25)};
}

Tensor leaf(const Tensor& x) { return x.detach().requires_grad_(); }

// Calls norm(x, weight, bias, options) and backward.
template <class F>
Results run(const Inputs& in, const Form& form, const F& norm) {
  const Tensor x = leaf(in.x), weight = leaf(in.weight), bias = leaf(in.bias), residual = leaf(in.residual);
  const std::int64_t channels = x.shape()[1];
  const auto estimate = [&](double first) {
    return arange(first, first + static_cast<double>(channels), 1, float64).to(weight.dtype()).to(x.device()) * 0.25;
  };
  const BatchNormOptions options{.running_mean = estimate(-1),
                                 .running_var = estimate(1),
                                 .training = form.training,
                                 .momentum = 0.25,
                                 .eps = 1e-3,
                                 .relu = form.relu,
                                 .residual = form.residual ? residual : Tensor{}};
  const Tensor y = norm(x, form.affine ? weight : Tensor{}, form.affine ? bias : Tensor{}, options);
  y.backward(in.dy);
  return {y.detach(), x.grad(), weight.grad(), bias.grad(), residual.grad(), options.running_mean, options.running_var};
}

Tensor as_channel(const Tensor& x, int rank) {
  Shape shape = Shape::filled(rank, 1);
  shape[1] = x.numel();
  return reshape(x, shape);
}

// The definition, in recorded ops.
Tensor defined_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const BatchNormOptions& options) {
  Dims axes{0};
  for (int i = 2; i < x.dim(); ++i) {
    axes.push_back(i);
  }
  const auto spread = [&](const Tensor& t) { return as_channel(t, x.dim()); };
  Tensor m = options.running_mean, v = options.running_var;
  if (options.training) {
    m = mean(x, axes);
    v = var(x, axes, 0);
    copy_into(options.running_mean, options.running_mean * 0.75 + m.detach() * 0.25);
    copy_into(options.running_var, options.running_var * 0.75 + var(x, axes).detach() * 0.25);
  }
  Tensor y = (x - spread(m)) / sqrt(spread(v) + options.eps);
  y = weight.defined() ? y * spread(weight) + spread(bias) : y;
  y = options.residual.defined() ? y + options.residual : y;
  return options.relu ? relu(y) : y;
}

Inputs widened(const Inputs& in) {
  const auto wide = [](const Tensor& x) { return contiguous(x.to(Device::cpu()).to(float64)); };
  return {wide(in.x), wide(in.weight), wide(in.bias), wide(in.residual), wide(in.dy)};
}

void expect_matches(const Results& got, const Results& expected, DType dtype, const std::string& what) {
  const double tolerance = dtype == float64 ? 1e-11 : 2e-5;
  const auto compare = [&](const Tensor& a, const Tensor& b, const char* name) {
    ASSERT_EQ(a.defined(), b.defined()) << what << ", " << name;
    if (a.defined()) {
      ASSERT_EQ(a.shape(), b.shape()) << what << ", " << name;
      expect_rows_close(a, to_vector<double>(b), std::max<std::int64_t>(b.numel(), 1), tolerance, what + ", " + name);
    }
  };
  compare(got.y, expected.y, "y");
  compare(got.dx, expected.dx, "dx");
  compare(got.dweight, expected.dweight, "dweight");
  compare(got.dbias, expected.dbias, "dbias");
  compare(got.dresidual, expected.dresidual, "dresidual");
  compare(got.running_mean, expected.running_mean, "running_mean");
  compare(got.running_var, expected.running_var, "running_var");
}

constexpr Form kForms[] = {{},
                           {.relu = true},
                           {.relu = true, .residual = true},
                           {.residual = true, .affine = false},
                           {.training = false},
                           {.training = false, .relu = true, .residual = true},
                           {.training = false, .relu = true, .affine = false}};

TEST(BatchNorm, MatchesItsDefinition) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : std::vector<std::pair<DType, DType>>{{float64, float64},
                                                                                  {float32, float32},
                                                                                  {float16, float16},
                                                                                  {float16, float32},
                                                                                  {bfloat16, bfloat16},
                                                                                  {bfloat16, float32}}) {
      for (const Shape& shape : {Shape{5, 3}, Shape{300, 40}, Shape{4, 5, 7}, Shape{3, 1, 4, 5}, Shape{2, 24, 8, 8},
                                 Shape{9, 8, 1, 1}, Shape{40, 3, 5, 1}, Shape{2, 6, 2, 3, 4}, Shape{1, 72, 3, 3}}) {
        for (const bool last : {false, true}) {
          if (last && shape.size() < 4) {
            continue;
          }
          const Inputs in = random_inputs(shape, dtype, weight_dtype, device, last);
          const Inputs wide = widened(in);
          for (const Form& form : kForms) {
            const std::string what = fmt::format("{} {} {} {} last {}, training {} relu {} residual {}", device, dtype,
                                                 weight_dtype, shape, last, form.training, form.relu, form.residual);
            const Results got = run(in, form, batch_norm);
            expect_matches(got, run(wide, form, defined_norm), dtype, what);
            EXPECT_EQ(got.y.dtype(), dtype);
            if (last) {
              EXPECT_TRUE(is_channels_last(got.y)) << what;
            }
            if (HasFatalFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

TEST(BatchNorm, LongSumsAndLargeMeans) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const bool last : {false, true}) {
      Inputs in = random_inputs({4, 16, 64, 48}, float32, float32, device, last);
      in.x = in.x + 300.0;
      const Results got = run(in, {.relu = true}, batch_norm);
      const Results expected = run(widened(in), {.relu = true}, defined_norm);
      expect_rows_close(got.y, to_vector<double>(expected.y), 64 * 48, 2e-4, "y");  // x has an error of 1.5e-5
      expect_rows_close(got.running_var, to_vector<double>(expected.running_var), 16, 2e-5, "running_var");
      expect_rows_close(got.dbias, to_vector<double>(expected.dbias), 16, 1e-4, "dbias");
      expect_same_bits(run(in, {.relu = true}, batch_norm).dx, got.dx);
    }
  }
}

TEST(BatchNorm, MixedLayoutsAndViews) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Inputs in = random_inputs({2, 8, 4, 4}, float32, float32, device, false);
    const Form form{.relu = true, .residual = true};
    const Results expected = run(widened(in), form, defined_norm);
    for (int which = 0; which < 4; ++which) {
      Inputs mixed = in;
      Tensor& moved = which == 0 ? mixed.x : which == 1 ? mixed.residual : mixed.dy;
      moved = which == 3 ? transpose(contiguous(transpose(moved, 0, 3)), 0, 3) : channels_last(moved);
      expect_matches(run(mixed, form, batch_norm), expected, float32, fmt::format("{} {}", device, which));
    }
    Inputs expanded = in;
    expanded.dy = expand(randn({1, 8, 1, 1}, float32, device), {2, 8, 4, 4});
    expect_matches(run(expanded, form, batch_norm), run(widened(expanded), form, defined_norm), float32, "expanded dy");
  }
}

TEST(BatchNorm, RunningStatistics) {
  for (const Device device : test_devices()) {
    const Tensor mean = zeros({1}, float32, device), var = zeros({1}, float32, device);
    const Tensor batches = zeros({}, int64, device);
    BatchNormOptions options{
        .running_mean = mean, .running_var = var, .num_batches_tracked = batches, .momentum = std::nullopt};
    const std::uint32_t version = mean.version();
    for (const double shift : {1.0, 2.0, 6.0}) {
      batch_norm(from_data({-1.f, 1.f, 0.f, 4.f}, {4, 1}, device) + shift, {}, {}, options);
    }
    EXPECT_EQ(batches.item(), 3);
    EXPECT_FLOAT_EQ(mean.item(), 4);  // the average of 2, 3 and 7
    EXPECT_FLOAT_EQ(var.item(), 14.0 / 3);
    EXPECT_EQ(mean.version(), version + 3);
    options.momentum = 0.5;
    batch_norm(from_data({0.f, 2.f}, {2, 1}, device), {}, {}, options);
    EXPECT_FLOAT_EQ(mean.item(), 2.5);
    EXPECT_EQ(batches.item(), 4);
    options.training = false;
    EXPECT_NEAR(batch_norm(from_data({2.5f}, {1, 1}, device), {}, {}, options).item(), 0, 1e-6);
    EXPECT_EQ(batches.item(), 4);
  }
}

TEST(BatchNorm, NanAndEmpty) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.f, NAN, 2.f, 3.f}, {2, 2}, device);
    const std::vector<double> y = to_vector<double>(batch_norm(x, {}, {}, {.relu = true}));
    EXPECT_TRUE(y[0] == 0 && std::isnan(y[1]) && std::abs(y[2] - 1) < 1e-4 && std::isnan(y[3]));
    const Tensor none = zeros({0, 2, 3}, float32, device).requires_grad_();
    const Tensor weight = ones({2}, float32, device).requires_grad_();
    const Tensor result = batch_norm(none, weight);
    EXPECT_EQ(result.shape(), none.shape());
    result.backward(result.detach());
    expect_close(weight.grad(), std::vector<double>{0, 0}, 0, 0);
  }
}

TEST(BatchNorm, Gradcheck) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const Form& form : kForms) {
      const auto norm = [&](const Tensors& in) {
        return batch_norm(in[0], form.affine ? in[1] : Tensor{}, form.affine ? in[2] : Tensor{},
                          {.running_mean = zeros({3}, float64, device),
                           .running_var = ones({3}, float64, device),
                           .training = form.training,
                           .relu = form.relu,
                           .residual = form.residual ? in.back() : Tensor{}});
      };
      Tensors in{randn({2, 3, 4}, float64, device)};
      if (form.affine) {
        in.push_back(randn({3}, float64, device));
        in.push_back(randn({3}, float64, device));
      }
      if (form.residual) {
        in.push_back(randn({2, 3, 4}, float64, device));
      }
      EXPECT_TRUE(autograd::gradcheck(norm, in));
      EXPECT_TRUE(autograd::gradgradcheck(norm, in));
    }
  }
}

// A gather that returns the moments of two equal halves gives the statistics of one half.
TEST(BatchNorm, OverRanks) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    const Tensor whole = randn({6, 3, 5}, float64, device), dy = randn({6, 3, 5}, float64, device);
    const Tensor weight = randn({3}, float64, device);
    const Tensor x = leaf(whole);
    const Tensor y = batch_norm(x, weight);
    y.backward(dy);
    // Both parts, of different sizes, in turns: the first pass collects what each rank sends.
    std::vector<Tensor> sent;
    const auto part = [&](int rank, const std::vector<Tensor>& all) {
      const Tensor mine = leaf(slice(whole, 0, rank == 0 ? 0 : 2, rank == 0 ? 2 : 6));
      std::size_t call = 0;
      const Tensor result = batch_norm(mine, weight, {}, {.gather = [&](const Tensor& m) {
                                         sent.push_back(m);
                                         const std::size_t at = 2 * call++;
                                         return all.size() > at + 1 ? stack({all[at], all[at + 1]}) : stack({m, m});
                                       }});
      result.backward(slice(dy, 0, rank == 0 ? 0 : 2, rank == 0 ? 2 : 6));
      return Tensors{result.detach(), mine.grad()};
    };
    std::vector<Tensor> all;
    for (int round = 0; round < 2; ++round) {  // the statistics first, then the gradients that depend on them
      sent.clear();
      part(0, all);
      part(1, all);
      all = {sent[0], sent[2], sent[1], sent[3]};
    }
    const Tensors a = part(0, all), b = part(1, all);
    expect_close(cat({a[0], b[0]}), y.detach(), 1e-12, 1e-12);
    expect_close(cat({a[1], b[1]}), x.grad(), 1e-11, 1e-11);
  }
}

TEST(BatchNorm, Errors) {
  const Tensor x = ones({2, 3, 4});
  expect_error([&] { batch_norm(ones({3})); },
               "batch_norm: expected a floating x of at least two axes, got float32 [3]");
  expect_error([&] { batch_norm(x, ones({2})); }, "batch_norm: expected weight of shape [3], got [2]");
  expect_error([&] { batch_norm(x, {}, ones({3}, float64)); }, "batch_norm: expected bias of float32, got float64");
  expect_error([&] { batch_norm(x, {}, {}, {.training = false}); }, "batch_norm: expected running statistics");
  expect_error([&] { batch_norm(x, {}, {}, {.running_mean = ones({3})}); }, "both running_mean and running_var");
  expect_error([&] { batch_norm(ones({1, 3})); }, "expected more than one element per channel in training");
  expect_error([&] { batch_norm(x, {}, {}, {.eps = -1}); }, "expected eps of at least 0, got -1");
  expect_error([&] { batch_norm(x, {}, {}, {.residual = ones({2, 3})}); }, "expected a residual like x");
  expect_error(
      [&] { batch_norm(x, {}, {}, {.running_mean = ones({3}), .running_var = ones({3}), .momentum = std::nullopt}); },
      "expected num_batches_tracked");
}

}  // namespace batch_norm_test
