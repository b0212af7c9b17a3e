#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "norm_kernel_cases.h"
#include "tests/launches.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/nn/rms_norm.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/reduce/reduce.h>

using namespace mica;
using namespace mica::testing_support;

namespace rms_norm_test {

constexpr double kEps = 1e-6;

struct Inputs {
  Tensor x, weight, dy;
};

struct Results {
  Tensor y, dx, dweight;
};

struct Needs {
  bool x = true;
  bool weight = true;
};

Inputs random_inputs(const NormCase& c, Device device) {
  return {.x = randn({c.rows, c.columns}, c.dtype, device),
          .weight = randn({c.columns}, c.weight_dtype, device),
          .dy = randn({c.rows, c.columns}, c.dtype, device)};
}

Results run(const Inputs& in, Needs needs = {}, double eps = kEps) {
  const Tensor x = in.x.detach().requires_grad_(needs.x);
  const Tensor weight = in.weight.defined() ? in.weight.detach().requires_grad_(needs.weight) : Tensor{};
  const int leading = in.x.dim() - (in.weight.defined() ? in.weight.dim() : 1);
  const Tensor y = rms_norm(x, x.shape().slice(leading), weight, eps);
  if (y.requires_grad()) {
    y.backward(in.dy);
  }
  return {.y = y.detach(), .dx = x.grad(), .dweight = weight.defined() ? weight.grad() : Tensor{}};
}

// The results by the formulas, and the size of each result's terms, to which rounding errors are proportional.
struct Reference {
  std::vector<double> y, dx, dweight;
  std::vector<double> y_scale, dx_scale;  // one per row
  std::vector<double> dweight_scale;      // one per column
};

// With sums of type `Sum`.
template <class Sum>
Reference reference_with(const Inputs& in, double eps) {
  const std::vector<double> x_values = to_vector<double>(in.x);
  const std::vector<double> dy_values = to_vector<double>(in.dy);
  const std::int64_t columns = in.weight.defined() ? in.weight.numel() : in.x.size(-1);
  const std::vector<double> weights =
      in.weight.defined() ? to_vector<double>(in.weight) : std::vector<double>(columns, 1);
  const std::int64_t rows = in.x.numel() / columns;
  Reference r{.y = std::vector<double>(x_values.size()),
              .dx = std::vector<double>(x_values.size()),
              .dweight = {},
              .y_scale = std::vector<double>(rows),
              .dx_scale = std::vector<double>(rows),
              .dweight_scale = std::vector<double>(columns)};
  std::vector<Sum> dweights(columns);
  // Pointers, since tests are not optimized.
  const double *const x = x_values.data(), *const dy = dy_values.data(), *const w = weights.data();
  double *const y = r.y.data(), *const dx = r.dx.data(), *const dweight_scale = r.dweight_scale.data();
  Sum* const dweight = dweights.data();
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t first = row * columns;
    Sum squares = 0;
    for (std::int64_t i = first; i < first + columns; ++i) {
      squares += static_cast<Sum>(x[i]) * x[i];
    }
    const auto rstd = static_cast<double>(1 / std::sqrt(squares / columns + eps));
    Sum sum = 0;
    double y_scale = 0;
    double g_scale = 0;
    double x_hat_scale = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t i = first + c;
      const double x_hat = x[i] * rstd;
      y[i] = x_hat * w[c];
      sum += static_cast<Sum>(dy[i]) * w[c] * x_hat;
      dweight[c] += static_cast<Sum>(dy[i]) * x_hat;
      dweight_scale[c] += std::abs(dy[i]) * std::max(1.0, std::abs(x_hat));
      y_scale = std::max(y_scale, std::abs(y[i]));
      g_scale = std::max(g_scale, std::abs(dy[i] * w[c]));
      x_hat_scale = std::max(x_hat_scale, std::abs(x_hat));
    }
    const auto mean = static_cast<double>(sum / columns);
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t i = first + c;
      dx[i] = rstd * (dy[i] * w[c] - x[i] * rstd * mean);
    }
    r.y_scale[row] = y_scale;
    // The terms of the sum may cancel. Its error is proportional to the largest of them.
    r.dx_scale[row] = rstd * (g_scale + x_hat_scale * std::max(std::abs(mean), g_scale / 4));
  }
  r.dweight.assign(dweights.begin(), dweights.end());
  return r;
}

Reference reference(const Inputs& in, double eps = kEps) {
  // The reference for float64 must be more accurate than float64.
  return in.x.dtype() == float64 ? reference_with<long double>(in, eps) : reference_with<double>(in, eps);
}

double tolerance(const NormCase& c) { return 12 * epsilon_of(accumulate_dtype(c.dtype)); }

void expect_matches(const Results& got, const Reference& r, const NormCase& c) {
  const auto expect = [&](const Tensor& t, DType dtype, const std::vector<double>& expected,
                          const std::vector<double>& scales, std::int64_t columns, const char* name) {
    if (t.defined()) {
      ASSERT_EQ(t.dtype(), dtype);
      expect_rows_close(t, expected, scales, columns, tolerance(c), fmt::format("{}, {}", name, c.name()));
    }
  };
  expect(got.y, c.dtype, r.y, r.y_scale, c.columns, "y");
  expect(got.dx, c.dtype, r.dx, r.dx_scale, c.columns, "dx");
  expect(got.dweight, c.weight_dtype, r.dweight, r.dweight_scale, 1, "dweight");
}

void expect_same(const Results& a, const Results& b, const std::string& what) {
  expect_same_bits(a.y, b.y, what + ": y");
  expect_same_bits(a.dx, b.dx, what + ": dx");
  expect_same_bits(a.dweight, b.dweight, what + ": dweight");
}

// One test for each pair of dtypes, so that they can run in parallel.
class RMSNormTypes : public testing::TestWithParam<std::pair<DType, DType>> {};
INSTANTIATE_TEST_SUITE_P(All, RMSNormTypes, testing::ValuesIn(kNormTypes), name_of_types);

TEST_P(RMSNormTypes, MatchReference) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const NormCase& c : norm_grid(device, GetParam())) {
      if (c.rows * c.columns == 0) {
        continue;
      }
      SCOPED_TRACE(to_string(device));
      const Inputs in = random_inputs(c, device);
      expect_matches(run(in), reference(in), c);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

// Runs each kernel; see LayerNormTypes.EachKernel.
TEST_P(RMSNormTypes, EachKernel) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const cuda::LaunchRecord all;
    for (const auto& [c, kernel] : norm_kernel_cases(device, GetParam(), /*centered=*/false)) {
      const cuda::LaunchRecord record;
      const Inputs in = random_inputs(c, device);
      const Reference expected = reference(in);
      expect_matches(run(in), expected, c);
      expect_launched(record, device, {kernel.name.c_str()}, c.name());
      expect_matches(run(in, {.x = false}), expected, c);
      if (HasFailure()) {
        return;
      }
    }
    expect_launched(all, device, {"norm_backward_parameters_kernel", "norm_backward_sum_kernel"});
  }
}

TEST(RMSNorm, WeightIsOptionalAndGradientsNotNeededChangeNoOther) {
  manual_seed(3);
  OneIn three(3);
  for (const Device device : test_devices()) {
    std::vector<std::int64_t> lengths = some_columns(device);
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : lengths) {
        if (three.skips()) {
          continue;
        }
        const NormCase c{dtype, weight_dtype, columns <= 16'384 ? 19 : 3, columns};
        const Inputs in = random_inputs(c, device);
        const Results all = run(in);
        expect_matches(all, reference(in), c);
        const Results x_only = run(in, {.weight = false});
        const Results weight_only = run(in, {.x = false});
        EXPECT_FALSE(x_only.dweight.defined());
        EXPECT_FALSE(weight_only.dx.defined());
        // Without dx, a GPU may sum over rows in another order.
        const bool same_sums = device.is_cpu();
        expect_same({all.y, all.dx, same_sums ? all.dweight : Tensor{}},
                    {x_only.y, x_only.dx, same_sums ? weight_only.dweight : Tensor{}}, c.name());
        expect_matches(weight_only, reference(in), c);
        expect_same_bits(no_grad([&] { return run(in).y; }), all.y, c.name());
        const Inputs plain{.x = in.x, .weight = {}, .dy = in.dy};
        expect_matches(run(plain), reference(plain), c);
      }
    }
  }
}

TEST(RMSNorm, SeveralAxesAreOneRow) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Inputs in{.x = randn({2, 3, 4, 5}, float32, device),
                    .weight = randn({4, 5}, float32, device),
                    .dy = randn({2, 3, 4, 5}, float32, device)};
    const Results got = run(in);
    EXPECT_EQ(got.y.shape(), (Shape{2, 3, 4, 5}));
    EXPECT_EQ(got.dweight.shape(), (Shape{4, 5}));
    expect_matches(got, reference(in), {float32, float32, 6, 20});
  }
}

TEST(RMSNorm, AnyLayout) {
  manual_seed(5);
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        const NormCase c{dtype, weight_dtype, columns <= 16'384 ? 6 : 3, columns};
        const Inputs in = random_inputs(c, device);
        const Reference expected = reference(in);
        for (const auto layout : {with_gaps, off_by_one}) {
          // Changes the layout of one tensor at a time, then of all, since a kernel might check only one pointer's
          // alignment.
          for (int which = 0; which < 4; ++which) {
            const auto laid_out = [&](int i, const Tensor& x) { return which == i || which == 3 ? layout(x) : x; };
            expect_matches(run({laid_out(0, in.x), laid_out(1, in.weight), laid_out(2, in.dy)}), expected, c);
          }
        }
      }
    }
    Inputs in = random_inputs({float32, float32, 6, 40}, device);
    in.dy = broadcast_view(randn({40}, float32, device), {6, 40});
    expect_matches(run(in), reference(in), {float32, float32, 6, 40});
  }
}

TEST(RMSNorm, Gradcheck) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : {1, 2, 3, 8, 33}) {
      const Tensor x = randn({4, columns}, float64, device);
      const Tensor weight = randn({columns}, float64, device);
      const auto weighted = [=](const Tensor& x, const Tensor& weight) { return rms_norm(x, {columns}, weight, 0.1); };
      const auto plain = [=](const Tensor& x) { return rms_norm(x, {columns}); };
      EXPECT_TRUE(autograd::gradcheck(weighted, {x, weight}));
      EXPECT_TRUE(autograd::gradcheck(plain, {x}));
      EXPECT_TRUE(autograd::gradgradcheck(weighted, {x, weight}));
      EXPECT_TRUE(autograd::gradgradcheck(plain, {x}));
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& w) { return weighted(x, w); }, {weight}));
    }
    const auto two_axes = [](const Tensor& x, const Tensor& weight) { return rms_norm(x, {3, 4}, weight); };
    const Tensors in{randn({2, 3, 4}, float64, device), randn({3, 4}, float64, device)};
    EXPECT_TRUE(autograd::gradcheck(two_axes, in));
    EXPECT_TRUE(autograd::gradgradcheck(two_axes, in));
  }
}

TEST(RMSNorm, NoElements) {
  for (const Device device : test_devices()) {
    const Results no_rows = run({.x = empty({0, 6}, float32, device),
                                 .weight = ones({6}, float32, device),
                                 .dy = empty({0, 6}, float32, device)});
    EXPECT_EQ(no_rows.y.shape(), (Shape{0, 6}));
    EXPECT_EQ(no_rows.dx.shape(), (Shape{0, 6}));
    expect_close(no_rows.dweight, std::vector<double>(6, 0), 0, 0);
    const Results no_columns = run({.x = empty({4, 0}, float32, device),
                                    .weight = empty({0}, float32, device),
                                    .dy = empty({4, 0}, float32, device)});
    EXPECT_EQ(no_columns.y.shape(), (Shape{4, 0}));
    EXPECT_EQ(no_columns.dweight.shape(), (Shape{0}));
  }
}

TEST(RMSNorm, Extremes) {
  const double infinity = INFINITY;
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float64, bfloat16}) {
      const auto normed = [&](const std::vector<double>& x, double eps) {
        const Tensor row = from_data(x, {1, static_cast<std::int64_t>(x.size())}, device).to(dtype);
        return rms_norm(row, {row.size(1)}, {}, eps);
      };
      const double rtol = std::max(1e-6, epsilon_of(dtype));
      expect_close(normed({1e4, -1e4, 1e4}, kEps), {1, -1, 1}, rtol, 0);
      expect_close(normed({0, 0}, kEps), {0, 0}, 0, 0);
      expect_close(normed({0, 0}, 0), {NAN, NAN}, 0, 0);  // 0 · ∞
      expect_close(normed({1e-15, 1e-15}, 0), {1, 1}, rtol, 0);
      expect_close(normed({1, infinity}, kEps), {0, NAN}, 0, 0);  // ∞ / ∞
      expect_close(normed({1, NAN}, kEps), {NAN, NAN}, 0, 0);
      if (dtype != float64) {
        expect_close(normed({1e30, 1}, kEps), {0, 0}, 0, 0);  // the sum of squares is infinite
      }
    }
  }
}

TEST(RMSNorm, SameBitsInEveryRun) {
  manual_seed(7);
  const int threads = num_threads();
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : some_columns(device)) {
        if (three.skips()) {
          continue;
        }
        const NormCase c{dtype, weight_dtype, columns <= 1024 ? 700 : 40, columns};
        const Inputs in = random_inputs(c, device);
        const Results once = run(in);
        for (const int count : {1, 3}) {
          set_num_threads(count);
          expect_same(run(in), once, c.name());
        }
        set_num_threads(threads);
        // A row does not depend on other rows.
        const Results some = run({rows_of(in.x, 5, 3), in.weight, rows_of(in.dy, 5, 3)});
        expect_same_bits(some.y, rows_of(once.y, 5, 3), c.name());
        expect_same_bits(some.dx, rows_of(once.dx, 5, 3), c.name());
      }
    }
  }
}

TEST(RMSNorm, MoreElementsThan32BitsCount) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  manual_seed(8);
  const std::int64_t rows = (std::int64_t{1} << 32) / 512 + 77;
  try {
    const NormCase c{float16, float32, rows, 512};
    const Inputs in = random_inputs(c, Device::cuda());
    const Results all = run(in);
    for (const std::int64_t begin : {std::int64_t{0}, rows / 2 - 3, rows - 9}) {
      const Inputs part{.x = rows_of(in.x, begin, 9), .weight = in.weight, .dy = rows_of(in.dy, begin, 9)};
      const Results some = run(part);
      expect_matches(some, reference(part), c);
      expect_same_bits(some.y, rows_of(all.y, begin, 9), "y");
      expect_same_bits(some.dx, rows_of(all.dx, begin, 9), "dx");
    }
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

TEST(RMSNorm, Errors) {
  const Tensor x = ones({2, 4});
  expect_error([&] { rms_norm(x, {3}); }, "rms_norm: expected x of a shape that ends in [3], got [2, 4]");
  expect_error([&] { rms_norm(x, {}); }, "rms_norm: expected normalized_shape of at least one axis, got []");
  expect_error([&] { rms_norm(ones({4}), {2, 4}); }, "rms_norm: expected x of a shape that ends in [2, 4], got [4]");
  expect_error([&] { rms_norm(x, {4}, ones({3})); }, "rms_norm: expected weight of shape [4], got [3]");
  expect_error([&] { rms_norm(x, {4}, ones({4}, float64)); }, "rms_norm: expected weight of float32, got float64");
  expect_error([&] { rms_norm(x.to(float16), {4}, ones({4}, bfloat16)); },
               "rms_norm: expected weight of float16 or float32, got bfloat16");
  expect_error([&] { rms_norm(ones({4}, int64), {4}); }, "rms_norm: expected x of a floating dtype, got int64");
  expect_error([&] { rms_norm(x, {4}, {}, -1); }, "rms_norm: expected eps of at least 0, got -1");
  expect_error([&] { rms_norm(Tensor{}, {4}); }, "rms_norm: expected a defined x, got an undefined one");
  if (cuda_available()) {
    expect_error([&] { rms_norm(x, {4}, ones({4}, float32, Device::cuda())); }, "rms_norm: expected weight on cpu");
  }
}

TEST(RMSNorm, Module) {
  manual_seed(9);
  const Tensor x = randn({3, 10});
  const nn::RMSNorm norm(10);
  EXPECT_EQ(norm.named_parameters().size(), 1u);
  EXPECT_EQ(norm.named_parameters()[0].first, "weight");
  expect_same_bits(norm(x), rms_norm(x, {10}, ones({10})));
  const nn::RMSNorm plain(Shape{3, 10}, {.eps = 0.5, .elementwise_affine = false});
  EXPECT_TRUE(plain.named_parameters().empty());
  expect_same_bits(plain(x), rms_norm(x, {3, 10}, {}, 0.5));
  expect_error([] { nn::RMSNorm(4, {.eps = -1}); }, "RMSNorm: expected eps >= 0, got -1");
}

}  // namespace rms_norm_test
