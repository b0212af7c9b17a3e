#include "../support.h"
#include "norm_grid.h"
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/layer_norm/layer_norm.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

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

Inputs random_inputs(const NormCase& c, Device device) {
  return {.x = randn({c.rows, c.columns}, c.dtype, device),
          .weight = randn({c.columns}, c.weight_dtype, device),
          .bias = randn({c.columns}, c.weight_dtype, device),
          .dy = randn({c.rows, c.columns}, c.dtype, device)};
}

// Forward and backward, with every needed input a fresh leaf on the same elements.
Results run(const Inputs& in, Needs needs = {}, double eps = kEps) {
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

// The formulas as they stand, in float64 with wider sums, and the size of what is added up in each result: rounding
// errors are proportional to that, not to what is left when it cancels.
struct Reference {
  std::vector<double> y, dx, dweight, dbias;
  std::vector<double> y_scale, dx_scale;           // by row
  std::vector<double> dweight_scale, dbias_scale;  // by column
};

Reference reference(const Inputs& in, double eps = kEps) {
  const std::vector<double> x = to_vector<double>(in.x);
  const std::vector<double> dy = to_vector<double>(in.dy);
  const std::int64_t columns = in.weight.defined() ? in.weight.numel()
                               : in.bias.defined() ? in.bias.numel()
                                                   : in.x.size(-1);
  const std::vector<double> w = in.weight.defined() ? to_vector<double>(in.weight) : std::vector<double>(columns, 1);
  const std::vector<double> b = in.bias.defined() ? to_vector<double>(in.bias) : std::vector<double>(columns, 0);
  const std::int64_t rows = in.x.numel() / columns;

  Reference r;
  r.y.resize(x.size());
  r.dx.resize(x.size());
  r.dweight.resize(columns);
  r.dbias.resize(columns);
  r.dweight_scale.resize(columns);
  r.dbias_scale.resize(columns);
  std::vector<double> x_hat(columns);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t at = row * columns;
    const long double shift = x[at];
    long double sum = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
      sum += x[at + c] - shift;
    }
    const long double mean = shift + sum / columns;
    long double squares = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
      squares += (x[at + c] - mean) * (x[at + c] - mean);
    }
    const double rstd = 1 / std::sqrt(squares / columns + eps);
    // The mean is kept to half an epsilon of itself, and that much every x̂ of its row may be off in backward.
    const double x_hat_error = static_cast<double>(std::abs(mean)) * rstd / 8;
    long double g_sum = 0;
    long double gx_sum = 0;
    double y_scale = 0;
    double g_scale = 0;
    double x_hat_scale = 1;
    for (std::int64_t c = 0; c < columns; ++c) {
      x_hat[c] = static_cast<double>(x[at + c] - mean) * rstd;
      r.y[at + c] = x_hat[c] * w[c] + b[c];
      g_sum += dy[at + c] * w[c];
      gx_sum += dy[at + c] * w[c] * x_hat[c];
      r.dweight[c] += dy[at + c] * x_hat[c];
      r.dbias[c] += dy[at + c];
      r.dweight_scale[c] += std::abs(dy[at + c]) * (std::max(1.0, std::abs(x_hat[c])) + x_hat_error);
      r.dbias_scale[c] += std::abs(dy[at + c]);
      y_scale = std::max(y_scale, std::abs(x_hat[c] * w[c]) + std::abs(b[c]));
      g_scale = std::max(g_scale, std::abs(dy[at + c] * w[c]));
      x_hat_scale = std::max(x_hat_scale, std::abs(x_hat[c]));
    }
    const double g_mean = g_sum / columns;
    const double gx_mean = gx_sum / columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      r.dx[at + c] = rstd * (dy[at + c] * w[c] - g_mean - x_hat[c] * gx_mean);
    }
    r.y_scale.push_back(y_scale);
    r.dx_scale.push_back(rstd * (g_scale + std::abs(g_mean) + x_hat_scale * std::abs(gx_mean) +
                                 x_hat_error * (std::abs(gx_mean) + x_hat_scale * std::abs(g_mean))));
  }
  return r;
}

// One rounding to the result's dtype is half its epsilon. The rest is arithmetic in the dtype of sums: about four
// roundings an element, and the error of rstd and of the two means, which grows slowly with the length because sums are
// made of many short ones; 12 epsilons hold with room to spare, and anything kept in 16 bits on the way breaks them.
double tolerance(DType result, DType x) {
  const DType sums = accumulate_dtype(x);
  return 0.51 * epsilon_of(result) * (result == sums ? 0 : 1) + epsilon_of(sums) * 12;
}

void expect_matches(const Results& got, const Reference& r, const NormCase& c) {
  const double rows_tolerance = tolerance(c.dtype, c.dtype);
  const double sums_tolerance = tolerance(c.weight_dtype, c.dtype);
  expect_rows_close(got.y, r.y, r.y_scale, c.columns, rows_tolerance, "y, " + c.name());
  if (got.dx.defined()) {
    expect_rows_close(got.dx, r.dx, r.dx_scale, c.columns, rows_tolerance, "dx, " + c.name());
  }
  if (got.dweight.defined()) {
    ASSERT_EQ(got.dweight.dtype(), c.weight_dtype);
    expect_rows_close(got.dweight, r.dweight, r.dweight_scale, 1, sums_tolerance, "dweight, " + c.name());
  }
  if (got.dbias.defined()) {
    ASSERT_EQ(got.dbias.dtype(), c.weight_dtype);
    expect_rows_close(got.dbias, r.dbias, r.dbias_scale, 1, sums_tolerance, "dbias, " + c.name());
  }
}

void expect_same(const Results& a, const Results& b, const std::string& what) {
  expect_same_bits(a.y, b.y, what + ": y");
  expect_same_bits(a.dx, b.dx, what + ": dx");
  expect_same_bits(a.dweight, b.dweight, what + ": dweight");
  expect_same_bits(a.dbias, b.dbias, what + ": dbias");
}

// Row lengths that meet every kernel; the longest only where it is quick.
std::vector<std::int64_t> some_columns(Device device) {
  std::vector<std::int64_t> columns = {1, 7, 64, 100, 256, 500, 768, 1600, 4005};
  if (device.is_cuda()) {
    columns.insert(columns.end(), {8192, 16384, 20001, 50000});
  }
  return columns;
}

TEST(LayerNorm, MatchesReference) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const NormCase& c : norm_grid(device)) {
      SCOPED_TRACE(to_string(device));
      const Inputs in = random_inputs(c, device);
      expect_matches(run(in), reference(in), c);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST(LayerNorm, WeightAndBiasAreOptional) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : {5, 64, 333, 2048}) {
        const NormCase c{dtype, weight_dtype, 9, columns};
        for (const bool has_weight : {false, true}) {
          for (const bool has_bias : {false, true}) {
            Inputs in = random_inputs(c, device);
            in.weight = has_weight ? in.weight : Tensor{};
            in.bias = has_bias ? in.bias : Tensor{};
            const Results got = run(in);
            EXPECT_EQ(got.dweight.defined(), has_weight);
            EXPECT_EQ(got.dbias.defined(), has_bias);
            expect_matches(got, reference(in), c);
          }
        }
      }
    }
  }
}

TEST(LayerNorm, GradientsNotNeededAreNotComputedAndChangeNoOther) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : some_columns(device)) {
      const NormCase c{float32, float32, 19, columns};
      const Inputs in = random_inputs(c, device);
      const Results all = run(in);
      const Reference expected = reference(in);
      for (int mask = 0; mask < 7; ++mask) {
        const Needs needs{.x = (mask & 1) != 0, .weight = (mask & 2) != 0, .bias = (mask & 4) != 0};
        const Results some = run(in, needs);
        // Without dx the sums over rows may be added up in another order on a GPU.
        const bool same_sums = needs.x || device.is_cpu();
        expect_same({.y = all.y,
                     .dx = needs.x ? all.dx : Tensor{},
                     .dweight = needs.weight && same_sums ? all.dweight : Tensor{},
                     .dbias = needs.bias && same_sums ? all.dbias : Tensor{}},
                    {.y = some.y,
                     .dx = some.dx,
                     .dweight = same_sums ? some.dweight : Tensor{},
                     .dbias = same_sums ? some.dbias : Tensor{}},
                    fmt::format("{} columns, needs {}", columns, mask));
        EXPECT_EQ(some.dweight.defined(), needs.weight);
        EXPECT_EQ(some.dbias.defined(), needs.bias);
        expect_matches(some, expected, c);
      }
      expect_same_bits(no_grad([&] { return run(in).y; }), all.y);
    }
  }
}

TEST(LayerNorm, SeveralAxesAreOneRow) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Inputs in{.x = randn({2, 3, 4, 5}, float32, device),
                    .weight = randn({4, 5}, float32, device),
                    .bias = randn({4, 5}, float32, device),
                    .dy = randn({2, 3, 4, 5}, float32, device)};
    const Results got = run(in);
    EXPECT_EQ(got.y.shape(), (Shape{2, 3, 4, 5}));
    EXPECT_EQ(got.dweight.shape(), (Shape{4, 5}));
    expect_matches(got, reference(in), {float32, float32, 6, 20});

    if (device.is_cuda()) {  // more rows than a grid's y axis has blocks
      const Inputs many{.x = randn({100'000, 8, 16}, float32, device),
                        .weight = randn({8, 16}, float32, device),
                        .bias = randn({8, 16}, float32, device),
                        .dy = randn({100'000, 8, 16}, float32, device)};
      expect_matches(run(many), reference(many), {float32, float32, 100'000, 128});
    }

    const Inputs whole{.x = in.x, .weight = randn({2, 3, 4, 5}, float32, device), .bias = {}, .dy = in.dy};
    expect_matches(run(whole), reference(whole), {float32, float32, 1, 120});
  }
}

TEST(LayerNorm, AnyLayout) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        const NormCase c{dtype, weight_dtype, 6, columns};
        const Inputs in = random_inputs(c, device);
        const Reference expected = reference(in);
        for (const auto layout : {with_gaps, off_by_one}) {
          // Each alone and then all, since a kernel may look at one pointer's alignment and trust the others.
          for (int which = 0; which < 5; ++which) {
            const auto laid_out = [&](int i, const Tensor& x) { return which == i || which == 4 ? layout(x) : x; };
            const Inputs moved{.x = laid_out(0, in.x),
                               .weight = laid_out(1, in.weight),
                               .bias = laid_out(2, in.bias),
                               .dy = laid_out(3, in.dy)};
            expect_matches(run(moved), expected, c);
          }
        }
      }
    }
    // One row's gradient for all rows, as the gradient of a sum over rows is.
    Inputs in = random_inputs({float32, float32, 6, 40}, device);
    in.dy = broadcast_view(randn({40}, float32, device), {6, 40});
    expect_matches(run(in), reference(in), {float32, float32, 6, 40});
  }
}

TEST(LayerNorm, Gradcheck) {
  manual_seed(6);
  const auto norm = [](std::int64_t columns, bool has_weight, bool has_bias) {
    return [=](const Tensors& in) -> Tensor {
      return layer_norm(in[0], {columns}, has_weight ? in[1] : Tensor{}, has_bias ? in.back() : Tensor{});
    };
  };
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : {1, 2, 3, 8, 33}) {
      const Tensor x = randn({4, columns}, float64, device);
      const Tensor weight = randn({columns}, float64, device);
      const Tensor bias = randn({columns}, float64, device);
      EXPECT_TRUE(autograd::gradcheck(norm(columns, true, true), {x, weight, bias}));
      EXPECT_TRUE(autograd::gradcheck(norm(columns, true, false), {x, weight}));
      EXPECT_TRUE(autograd::gradcheck(norm(columns, false, true), {x, bias}));
      EXPECT_TRUE(autograd::gradcheck(norm(columns, false, false), {x}));
    }
    const auto two_axes = [](const Tensor& x, const Tensor& weight, const Tensor& bias) {
      return layer_norm(x, {3, 4}, weight, bias, 0.1);
    };
    EXPECT_TRUE(autograd::gradcheck(
        two_axes, {randn({2, 3, 4}, float64, device), randn({3, 4}, float64, device), randn({3, 4}, float64, device)}));
  }
}

TEST(LayerNorm, GradientsAccumulate) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    const Inputs in = random_inputs({float64, float64, 5, 12}, device);
    const Results once = run(in);
    const Tensor x = in.x.detach().requires_grad_();
    const Tensor weight = in.weight.detach().requires_grad_();
    const Tensor bias = in.bias.detach().requires_grad_();
    weight.set_grad(full({12}, 3, float64, device));
    for (int i = 0; i < 2; ++i) {
      layer_norm(x, {12}, weight, bias).backward(in.dy);
    }
    const auto twice = [](const Tensor& gradient, double before) {
      std::vector<double> values = to_vector<double>(gradient);
      for (double& value : values) {
        value = before + value + value;
      }
      return values;
    };
    expect_close(x.grad(), twice(once.dx, 0), 1e-14, 0);
    expect_close(weight.grad(), twice(once.dweight, 3), 1e-14, 1e-14);
    expect_close(bias.grad(), twice(once.dbias, 0), 1e-14, 0);
  }
}

// a · x + b, rounded to x's dtype.
Tensor affine(const Tensor& x, double a, double b) {
  std::vector<double> values = to_vector<double>(x);
  for (double& value : values) {
    value = a * value + b;
  }
  const Tensor result = empty_like(x);
  copy_into(result, from_data(values, x.shape()));
  return result;
}

TEST(LayerNorm, RowsFarFromZero) {
  manual_seed(8);
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : some_columns(device)) {
      if (columns < 64) {
        continue;  // too few to have a variance of about 1
      }
      const NormCase c{float32, float32, 7, columns};
      Inputs in = random_inputs(c, device);
      const Tensor x = in.x;
      in.x = affine(x, 1, 2000);
      expect_matches(run(in), reference(in), c);
      in.x = affine(x, 0.01, 100);
      expect_matches(run(in), reference(in), c);
    }
  }
}

TEST(LayerNorm, ManyLongRowsFarFromZero) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  manual_seed(15);
  const NormCase c{float32, float32, 1024, 32768};
  Inputs in = random_inputs(c, Device::cuda());
  in.x = affine(in.x, 0.01, 100);
  expect_matches(run(in), reference(in), c);
}

TEST(LayerNorm, ConstantRowsGiveTheBiasExactly) {
  manual_seed(9);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        for (const double value : {0.0, 0.1, -7.3, 3e4, 1e-6}) {
          Inputs in = random_inputs({dtype, weight_dtype, 3, columns}, device);
          in.x = full({3, columns}, value, dtype, device);
          const Results got = run(in);
          const Tensor expected = empty({3, columns}, dtype, device);
          copy_into(expected, broadcast_view(in.bias, {3, columns}));
          expect_same_bits(got.y, expected, fmt::format("{} in {}", value, dtype));
          for (const double element : to_vector<double>(got.dx)) {
            ASSERT_TRUE(std::isfinite(element)) << value << " in " << name_of(dtype);
          }
          expect_close(got.dweight, std::vector<double>(columns, 0), 0, 0.05);
        }
      }
    }
  }
}

TEST(LayerNorm, OneColumn) {
  for (const Device device : test_devices()) {
    const Inputs in{.x = full({2, 1}, 1e6, float32, device),
                    .weight = full({1}, 3, float32, device),
                    .bias = full({1}, 0.5, float32, device),
                    .dy = full({2, 1}, 2, float32, device)};
    const Results got = run(in);
    expect_close(got.y, {0.5, 0.5}, 0, 0);
    expect_close(got.dx, {0, 0}, 0, 0);
    expect_close(got.dweight, std::vector<double>{0}, 0, 0);
    expect_close(got.dbias, {4}, 0, 0);
  }
}

// Squares of these overflow float32; the op shrinks such rows by a power of 2 first.
TEST(LayerNorm, HugeValuesDoNotOverflow) {
  manual_seed(10);
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : some_columns(device)) {
      if (columns < 7) {
        continue;
      }
      for (const double size : {1e19, 1e30, 3e37}) {
        Inputs in = random_inputs({float32, float32, 4, columns}, device);
        std::vector<double> x = to_vector<double>(in.x);
        for (std::size_t i = 0; i < x.size(); ++i) {
          x[i] = std::clamp(x[i], -4.0, 4.0) * (i / columns == 1 ? 1 : size);  // row 1 stays ordinary
        }
        in.x = from_data(std::vector<float>(x.begin(), x.end()), in.x.shape(), device);
        const Results got = run(in);
        // dx is about 1/size: where that is subnormal it has few digits left, so only y and the sums are compared.
        expect_matches({.y = got.y, .dx = {}, .dweight = got.dweight, .dbias = got.dbias}, reference(in),
                       {float32, float32, 4, columns});
      }
      // The top of the range, where even a difference of two elements overflows.
      std::vector<float> top(columns);
      for (std::int64_t i = 0; i < columns; ++i) {
        top[i] = i % 2 == 0 ? 3.4e38f : -3.4e38f;
      }
      const Inputs in{.x = from_data(top, {1, columns}, device), .weight = {}, .bias = {}, .dy = {}};
      const Tensor y = layer_norm(in.x, {columns});
      const std::int64_t positive = (columns + 1) / 2;
      const double share = static_cast<double>(positive) / columns;
      std::vector<double> expected(columns);
      for (std::int64_t i = 0; i < columns; ++i) {
        const double mean = 2 * share - 1;
        expected[i] = ((i % 2 == 0 ? 1 : -1) - mean) / std::sqrt(1 - mean * mean);
      }
      expect_close(y, expected, 1e-5, 0, "the top of the range");
    }
  }
}

TEST(LayerNorm, NonFiniteValuesStayInTheirRow) {
  manual_seed(11);
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : some_columns(device)) {
      const Inputs clean = random_inputs({float32, float32, 5, columns}, device);
      for (const float bad : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> x = to_vector<float>(clean.x);
        x[2 * columns + columns / 2] = bad;
        const Inputs in{
            .x = from_data(x, clean.x.shape(), device), .weight = clean.weight, .bias = clean.bias, .dy = clean.dy};
        const Results got = run(in);
        const Results expected = run(clean);
        for (const std::int64_t row : {0, 1, 3, 4}) {
          expect_same_bits(rows_of(got.y, row, 1), rows_of(expected.y, row, 1));
          expect_same_bits(rows_of(got.dx, row, 1), rows_of(expected.dx, row, 1));
        }
        for (const double value : to_vector<double>(rows_of(got.y, 2, 1))) {
          ASSERT_TRUE(std::isnan(value));
        }
      }
    }
  }
}

TEST(LayerNorm, RowsDoNotDependOnHowManyThereAre) {
  manual_seed(12);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        const std::int64_t rows = columns <= 256 ? 1151 : 67;
        const Inputs in = random_inputs({dtype, weight_dtype, rows, columns}, device);
        const Results all = run(in);
        for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {5, 2}, {rows - 33, 33}}) {
          Inputs part = in;
          part.x = rows_of(in.x, begin, count);
          part.dy = rows_of(in.dy, begin, count);
          const Results some = run(part);
          expect_same_bits(some.y, rows_of(all.y, begin, count), "y");
          expect_same_bits(some.dx, rows_of(all.dx, begin, count), "dx");
        }
      }
    }
  }
}

TEST(LayerNorm, SameBitsEveryTimeAndWithAnyNumberOfThreads) {
  manual_seed(13);
  const int threads = num_threads();
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : some_columns(device)) {
      const Inputs in = random_inputs({float32, float32, 400'000 / (columns + 300), columns}, device);
      const Results first = run(in);
      for (const int count : {1, 2, 3, 7, threads}) {
        set_num_threads(count);
        expect_same(first, run(in), fmt::format("{} columns, {} threads", columns, count));
      }
    }
  }
  set_num_threads(threads);
}

TEST(LayerNorm, NoElements) {
  for (const Device device : test_devices()) {
    const Results no_rows = run({.x = empty({0, 6}, float32, device),
                                 .weight = ones({6}, float32, device),
                                 .bias = ones({6}, float32, device),
                                 .dy = empty({0, 6}, float32, device)});
    EXPECT_EQ(no_rows.y.shape(), (Shape{0, 6}));
    EXPECT_EQ(no_rows.dx.shape(), (Shape{0, 6}));
    expect_close(no_rows.dweight, std::vector<double>(6, 0), 0, 0);
    expect_close(no_rows.dbias, std::vector<double>(6, 0), 0, 0);

    const Results no_columns = run({.x = empty({4, 0}, float32, device),
                                    .weight = empty({0}, float32, device),
                                    .bias = empty({0}, float32, device),
                                    .dy = empty({4, 0}, float32, device)});
    EXPECT_EQ(no_columns.y.shape(), (Shape{4, 0}));
    EXPECT_EQ(no_columns.dweight.shape(), (Shape{0}));
  }
}

TEST(LayerNorm, EpsIsAddedUnderTheRoot) {
  manual_seed(14);
  for (const Device device : test_devices()) {
    for (const double eps : {0.0, 1e-12, 0.5, 100.0}) {
      const NormCase c{float32, float32, 4, 50};
      const Inputs in = random_inputs(c, device);
      expect_matches(run(in, {}, eps), reference(in, eps), c);
    }
  }
}

TEST(LayerNorm, MoreElementsThan32BitsCount) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  const std::int64_t rows = (std::int64_t{1} << 32) / 64 + 77;
  try {
    const Device device = Device::cuda();
    const Inputs in = random_inputs({float16, float32, rows, 64}, device);
    const Results all = run(in);
    for (const std::int64_t begin : {std::int64_t{0}, rows / 2 - 3, rows - 9}) {
      Inputs part = in;
      part.x = rows_of(in.x, begin, 9);
      part.dy = rows_of(in.dy, begin, 9);
      const Results some = run(part);
      expect_same_bits(some.y, rows_of(all.y, begin, 9), "y");
      expect_same_bits(some.dx, rows_of(all.dx, begin, 9), "dx");
    }
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

TEST(LayerNorm, Errors) {
  const Tensor x = randn({2, 768});
  expect_error([&] { layer_norm({}, {768}); }, "layer_norm: expected a defined x");
  expect_error([&] { layer_norm(x, {768}, ones({512})); }, "layer_norm: expected weight of shape [768], got [512]");
  expect_error([&] { layer_norm(x, {768}, {}, ones({512})); }, "layer_norm: expected bias of shape [768], got [512]");
  expect_error([&] { layer_norm(x, {768}, ones({1, 768})); }, "expected weight of shape [768], got [1, 768]");
  expect_error([&] { layer_norm(x, {512}); }, "layer_norm: expected x of a shape that ends in [512], got [2, 768]");
  expect_error([&] { layer_norm(x, {1, 2, 768}); }, "ends in [1, 2, 768], got [2, 768]");
  expect_error([&] { layer_norm(x, {}); }, "layer_norm: expected normalized_shape of at least one axis, got []");
  expect_error([&] { layer_norm(x, {768}, ones({768}, float16)); },
               "layer_norm: expected weight of float32, got float16");
  expect_error(
      [&] {
        layer_norm(randn({2, 8}, float16), {8}, {}, ones({8}, float64));
      },
      "layer_norm: expected bias of float16 or float32, got float64");
  expect_error(
      [&] {
        layer_norm(randn({2, 8}, float16), {8}, ones({8}, float16), ones({8}));
      },
      "layer_norm: expected bias of weight's float16, got float32");
  expect_error([&] { layer_norm(ones({2, 8}, int64), {8}); }, "layer_norm: expected x of a floating dtype, got int64");
  expect_error([&] { layer_norm(x, {768}, {}, {}, -1); }, "layer_norm: expected eps of at least 0, got -1");
  expect_error([&] { layer_norm(x, {768}, {}, {}, NAN); }, "layer_norm: expected eps of at least 0, got nan");
}

TEST(LayerNorm, ParametersOnAnotherDevice) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  expect_error(
      [] {
        layer_norm(randn({2, 8}, float32, Device::cuda()), {8}, ones({8}));
      },
      "layer_norm: expected weight on cuda:0, got it on cpu");
}

}  // namespace
