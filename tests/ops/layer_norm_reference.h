#pragma once

// Code shared by the tests of layer_norm: running it, its formulas in float64, and tolerances.

#include "../support.h"
#include "norm_grid.h"
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/norm/layer_norm.h>

namespace mica::layer_norm_testing {

using namespace mica::testing_support;

constexpr double kEps = 1e-5;

struct Inputs {
  Tensor x, weight, bias, dy;
};

struct Results {
  Tensor y, dx, dweight, dbias;
};

struct Needs {
  bool x = true;
  bool weight = true;
  bool bias = true;
};

inline Inputs random_inputs(const NormCase& c, Device device) {
  return {.x = randn({c.rows, c.columns}, c.dtype, device),
          .weight = randn({c.columns}, c.weight_dtype, device),
          .bias = randn({c.columns}, c.weight_dtype, device),
          .dy = randn({c.rows, c.columns}, c.dtype, device)};
}

/// The same inputs, but only rows [begin, begin + count).
inline Inputs part_of(const Inputs& in, std::int64_t begin, std::int64_t count) {
  return {.x = rows_of(in.x, begin, count), .weight = in.weight, .bias = in.bias, .dy = rows_of(in.dy, begin, count)};
}

/// Runs forward and backward. Each input whose gradient is needed becomes a new leaf that shares its elements.
inline Results run(const Inputs& in, Needs needs = {}, double eps = kEps) {
  const auto leaf = [](const Tensor& x, bool needed) {
    return x.defined() ? x.detach().requires_grad_(needed) : Tensor{};
  };
  const Tensor x = leaf(in.x, needs.x);
  const Tensor weight = leaf(in.weight, needs.weight);
  const Tensor bias = leaf(in.bias, needs.bias);
  const int leading = in.x.dim() - (in.weight.defined() ? in.weight.dim() : in.bias.defined() ? in.bias.dim() : 1);
  const Tensor y = layer_norm(x, x.shape().slice(leading), weight, bias, eps);
  if (y.requires_grad()) {
    y.backward(in.dy);
  }
  const auto grad = [](const Tensor& leaf) { return leaf.defined() ? leaf.grad() : Tensor{}; };
  return {.y = y.detach(), .dx = grad(x), .dweight = grad(weight), .dbias = grad(bias)};
}

/// The results by the formulas, and the size of each result's terms: rounding errors are proportional to that, not to
/// what remains after cancellation.
struct Reference {
  std::vector<double> y, dx, dweight, dbias;
  std::vector<double> y_scale, dx_scale;           // one per row
  std::vector<double> dweight_scale, dbias_scale;  // one per column
};

/// Computes the reference in float64, with sums of type `Sum`.
template <class Sum>
Reference reference_with(const Inputs& in, double eps) {
  const std::vector<double> x_values = to_vector<double>(in.x);
  const std::vector<double> dy_values = to_vector<double>(in.dy);
  const std::int64_t columns = in.weight.defined() ? in.weight.numel()
                               : in.bias.defined() ? in.bias.numel()
                                                   : in.x.size(-1);
  const std::vector<double> weights =
      in.weight.defined() ? to_vector<double>(in.weight) : std::vector<double>(columns, 1);
  const std::vector<double> biases = in.bias.defined() ? to_vector<double>(in.bias) : std::vector<double>(columns, 0);
  const std::int64_t rows = in.x.numel() / columns;
  constexpr std::int64_t kGrain = 1 << 16;  // elements per thread

  Reference r;
  r.y.resize(x_values.size());
  r.dx.resize(x_values.size());
  r.y_scale.resize(rows);
  r.dx_scale.resize(rows);
  r.dweight_scale.resize(columns);
  r.dbias_scale.resize(columns);
  std::vector<double> normalized(x_values.size());
  std::vector<double> x_hat_error(rows);
  // Pointers, since tests are not optimized.
  const double *const x = x_values.data(), *const dy = dy_values.data(), *const w = weights.data();
  const double* const b = biases.data();
  double *const x_hat = normalized.data(), *const y = r.y.data(), *const dx = r.dx.data();
  parallel_for(rows, std::max<std::int64_t>(kGrain / columns, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t first = row * columns;
      const Sum shift = x[first];
      Sum sum = 0;
      for (std::int64_t i = first; i < first + columns; ++i) {
        sum += x[i] - shift;
      }
      const Sum mean = shift + sum / columns;
      Sum squares = 0;
      for (std::int64_t i = first; i < first + columns; ++i) {
        squares += (x[i] - mean) * (x[i] - mean);
      }
      const double rstd = 1 / std::sqrt(squares / columns + eps);
      // For 16-bit x, the saved mean has a relative error of up to half an epsilon, which shifts every x̂ of its row in
      // backward. For other dtypes, backward corrects for that.
      x_hat_error[row] = size_of(in.x.dtype()) == 2 ? static_cast<double>(std::abs(mean)) * rstd / 8 : 0;
      Sum g_sum = 0;
      Sum gx_sum = 0;
      double y_scale = 0;
      double g_scale = 0;
      double x_hat_scale = 1;
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t i = first + c;
        x_hat[i] = static_cast<double>(x[i] - mean) * rstd;
        y[i] = x_hat[i] * w[c] + b[c];
        g_sum += dy[i] * w[c];
        gx_sum += dy[i] * w[c] * x_hat[i];
        y_scale = std::max(y_scale, std::abs(x_hat[i] * w[c]) + std::abs(b[c]));
        g_scale = std::max(g_scale, std::abs(dy[i] * w[c]));
        x_hat_scale = std::max(x_hat_scale, std::abs(x_hat[i]));
      }
      const double g_mean = g_sum / columns;
      const double gx_mean = gx_sum / columns;
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t i = first + c;
        dx[i] = rstd * (dy[i] * w[c] - g_mean - x_hat[i] * gx_mean);
      }
      r.y_scale[row] = y_scale;
      r.dx_scale[row] = rstd * (g_scale + std::abs(g_mean) + x_hat_scale * std::abs(gx_mean) +
                                x_hat_error[row] * (std::abs(gx_mean) + x_hat_scale * std::abs(g_mean)));
    }
  });

  std::vector<Sum> dweights(columns);
  std::vector<Sum> dbiases(columns);
  Sum *const dweight = dweights.data(), *const dbias = dbiases.data();
  double *const dweight_scale = r.dweight_scale.data(), *const dbias_scale = r.dbias_scale.data();
  const std::int64_t some = kGrain / std::max<std::int64_t>(rows, 1);
  parallel_for(columns, std::max<std::int64_t>(some, 64), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t c = begin; c < end; ++c) {
        const std::int64_t i = row * columns + c;
        dweight[c] += dy[i] * x_hat[i];
        dbias[c] += dy[i];
        const double size = std::abs(dy[i]);
        dweight_scale[c] += size * (std::max(1.0, std::abs(x_hat[i])) + x_hat_error[row]);
        dbias_scale[c] += size;
      }
    }
  });
  r.dweight.assign(dweights.begin(), dweights.end());
  r.dbias.assign(dbiases.begin(), dbiases.end());
  return r;
}

inline Reference reference(const Inputs& in, double eps = kEps) {
  // The reference for float64 must be more accurate than float64.
  return in.x.dtype() == float64 ? reference_with<long double>(in, eps) : reference_with<double>(in, eps);
}

/// The error of arithmetic in the dtype of sums: about four roundings per element, and the errors of rstd and of the
/// two means, which grow slowly with the length, since sums consist of many short ones. 12 epsilons leave room to
/// spare; rounding any intermediate result to 16 bits would exceed them.
inline double tolerance(const NormCase& c) { return 12 * epsilon_of(accumulate_dtype(c.dtype)); }

/// Compares dweight and dbias with the reference, if they are defined.
inline void expect_sums_match(const Results& got, const Reference& r, const NormCase& c) {
  if (got.dweight.defined()) {
    ASSERT_EQ(got.dweight.dtype(), c.weight_dtype);
    expect_rows_close(got.dweight, r.dweight, r.dweight_scale, 1, tolerance(c), "dweight, " + c.name());
  }
  if (got.dbias.defined()) {
    ASSERT_EQ(got.dbias.dtype(), c.weight_dtype);
    expect_rows_close(got.dbias, r.dbias, r.dbias_scale, 1, tolerance(c), "dbias, " + c.name());
  }
}

/// Compares y, and each gradient that is defined, with the reference.
inline void expect_matches(const Results& got, const Reference& r, const NormCase& c) {
  ASSERT_EQ(got.y.dtype(), c.dtype);
  expect_rows_close(got.y, r.y, r.y_scale, c.columns, tolerance(c), "y, " + c.name());
  if (got.dx.defined()) {
    ASSERT_EQ(got.dx.dtype(), c.dtype);
    expect_rows_close(got.dx, r.dx, r.dx_scale, c.columns, tolerance(c), "dx, " + c.name());
  }
  expect_sums_match(got, r, c);
}

inline void expect_same(const Results& a, const Results& b, const std::string& what) {
  expect_same_bits(a.y, b.y, what + ": y");
  expect_same_bits(a.dx, b.dx, what + ": dx");
  expect_same_bits(a.dweight, b.dweight, what + ": dweight");
  expect_same_bits(a.dbias, b.dbias, what + ": dbias");
}

}  // namespace mica::layer_norm_testing
