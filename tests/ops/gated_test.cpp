#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "norm_grid.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/nn/activation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace gated_test {

constexpr double kRoot2OverPi = 0.79788456080286536;

// The two overloads of an op, and its activation in float64 by PyTorch's formulas.
struct Op {
  std::string name;
  std::function<Tensor(const Tensor&, const Tensor&)> of_two;
  std::function<Tensor(const Tensor&)> of_halves;
  std::function<double(double)> value;
  std::function<double(double)> slope;
};

double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }
// (1 + tanh(u)) / 2, without cancellation.
double tanh_gate(double x) { return sigmoid_of(2 * kRoot2OverPi * (x + 0.044715 * x * x * x)); }

std::vector<Op> ops() {
  return {
      {"swiglu", [](const Tensor& gate, const Tensor& up) { return swiglu(gate, up); },
       [](const Tensor& x) { return swiglu(x); }, [](double x) { return x * sigmoid_of(x); },
       [](double x) { return sigmoid_of(x) * (1 + x * (1 - sigmoid_of(x))); }},
      {"geglu", [](const Tensor& gate, const Tensor& up) { return geglu(gate, up); },
       [](const Tensor& x) { return geglu(x); }, [](double x) { return x * (0.5 * std::erfc(-x * M_SQRT1_2)); },
       [](double x) { return 0.5 * std::erfc(-x * M_SQRT1_2) + x * (std::exp(-0.5 * x * x) * 0.39894228040143268); }},
      {"geglu tanh", [](const Tensor& gate, const Tensor& up) { return geglu(gate, up, GeluApproximation::tanh); },
       [](const Tensor& x) { return geglu(x, GeluApproximation::tanh); }, [](double x) { return x * tanh_gate(x); },
       [](double x) {
         const double s = tanh_gate(x);
         return s + x * s * (1 - s) * (2 * kRoot2OverPi * (1 + 3 * 0.044715 * x * x));
       }},
  };
}

struct Inputs {
  Tensor gate, up, dy;
};

struct Results {
  Tensor y, dgate, dup;
};

Inputs random_inputs(const Shape& shape, DType dtype, Device device) {
  // A standard deviation of three covers the range where the activations are curved.
  return {.gate = (randn(shape, float64, device) * 3).to(dtype),
          .up = randn(shape, dtype, device),
          .dy = randn(shape, dtype, device)};
}

Results run(const Op& op, const Inputs& in, bool wants_gate = true, bool wants_up = true) {
  const Tensor gate = in.gate.detach().requires_grad_(wants_gate);
  const Tensor up = in.up.detach().requires_grad_(wants_up);
  const Tensor y = op.of_two(gate, up);
  y.backward(in.dy);
  return {.y = y.detach(), .dgate = gate.grad(), .dup = up.grad()};
}

Results run_halves(const Op& op, const Inputs& in, Tensor (*layout)(const Tensor&) = nullptr) {
  const Tensor joined = cat({in.gate, in.up}, -1);
  const Tensor x = (layout != nullptr ? layout(joined) : joined).detach().requires_grad_();
  const Tensor y = op.of_halves(x);
  y.backward(in.dy);
  const std::int64_t n = x.size(-1) / 2;
  return {.y = y.detach(),
          .dgate = contiguous(slice(x.grad(), -1, 0, n)),
          .dup = contiguous(slice(x.grad(), -1, n, 2 * n))};
}

// The relative error of the arithmetic.
double tolerance(DType dtype) { return dtype == float64 ? 1e-14 : dtype == float32 ? 2e-6 : 2e-5; }

void expect_matches(const Results& got, const Op& op, const Inputs& in, const std::string& what) {
  const std::vector<double> g = to_vector<double>(in.gate);
  const std::vector<double> u = to_vector<double>(in.up);
  const std::vector<double> dy = to_vector<double>(in.dy);
  const DType dtype = in.gate.dtype();
  std::vector<double> y, dgate, dup, y_scale, dgate_scale, dup_scale;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double value = op.value(g[i]);
    const double slope = op.slope(g[i]);
    y.push_back(value * u[i]);
    dgate.push_back(dy[i] * u[i] * slope);
    dup.push_back(dy[i] * value);
    // Very small values of the exponential are less accurate: their relative error is the absolute error of the
    // argument.
    const double value_scale = std::max(std::abs(value), 1e-3);
    y_scale.push_back(std::abs(u[i]) * value_scale);
    dgate_scale.push_back(std::abs(dy[i] * u[i]) * std::max(std::abs(slope), 0.2));
    dup_scale.push_back(std::abs(dy[i]) * value_scale);
  }
  const auto expect = [&](const Tensor& t, const std::vector<double>& expected, const std::vector<double>& scale,
                          const char* name) {
    if (t.defined()) {
      ASSERT_EQ(t.dtype(), dtype);
      ASSERT_EQ(t.shape(), in.gate.shape());
      expect_rows_close(t, expected, scale, 1, tolerance(dtype), fmt::format("{}, {}, {}", op.name, what, name));
    }
  };
  expect(got.y, y, y_scale, "y");
  expect(got.dgate, dgate, dgate_scale, "dgate");
  expect(got.dup, dup, dup_scale, "dup");
}

const std::vector<DType> kDtypes = {float32, float64, float16, bfloat16};

const std::vector<Shape> kShapes = {{},      {0},      {1},      {3, 0},     {0, 5},     {7},       {8},
                                    {9},     {3, 5},   {2, 8},   {2, 3, 16}, {5, 33},    {3, 1024}, {2, 1031},
                                    {70, 4}, {129, 7}, {64, 96}, {40'001},   {333, 136}, {1, 4096}};

TEST(Gated, MatchesReference) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      for (const DType dtype : kDtypes) {
        for (const Shape& shape : kShapes) {
          const Inputs in = random_inputs(shape, dtype, device);
          const std::string what = fmt::format("{} {} on {}", dtype, shape, device);
          expect_matches(run(op, in), op, in, what);
          if (shape.size() > 0) {
            expect_matches(run_halves(op, in), op, in, what + " in halves");
          }
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST(Gated, AnyLayout) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      for (const DType dtype : kDtypes) {
        for (const Shape& shape : {Shape{6, 40}, Shape{1, 4097}, Shape{33, 21}}) {
          const Inputs in = random_inputs(shape, dtype, device);
          for (const auto layout : {with_gaps, off_by_one}) {
            // Changes the layout of one tensor at a time, then of all, since a kernel might check only one pointer's
            // alignment.
            for (int which = 0; which < 4; ++which) {
              const auto laid_out = [&](int i, const Tensor& x) { return which == i || which == 3 ? layout(x) : x; };
              const Inputs moved{.gate = laid_out(0, in.gate), .up = laid_out(1, in.up), .dy = laid_out(2, in.dy)};
              expect_matches(run(op, moved), op, in, "moved");
              expect_matches(run_halves(op, moved, which == 3 ? layout : nullptr), op, in, "moved halves");
            }
          }
        }
      }
    }
    // dy is a single number expanded to the shape, as the gradient of a sum is.
    Inputs in = random_inputs({6, 40}, float32, device);
    in.dy = broadcast_view(randn({1}, float32, device), {6, 40});
    expect_matches(run(ops()[0], in), ops()[0], in, "broadcast dy");
  }
}

TEST(Gated, GradientsNotNeededAreNotComputedAndChangeNoOther) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      for (const DType dtype : kDtypes) {
        const Inputs in = random_inputs({11, 24}, dtype, device);
        const Results all = run(op, in);
        const Results gate_only = run(op, in, true, false);
        const Results up_only = run(op, in, false, true);
        EXPECT_FALSE(gate_only.dup.defined());
        EXPECT_FALSE(up_only.dgate.defined());
        expect_same_bits(gate_only.dgate, all.dgate, op.name);
        expect_same_bits(up_only.dup, all.dup, op.name);
        expect_same_bits(gate_only.y, all.y, op.name);
      }
    }
  }
}

TEST(Gated, ExtremeValues) {
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> gates = {0.0, -0.0, 1e-30, -1e-30, 5,   -5,   12,       -12,       50,          -50,
                                     100, -100, 1e4,   -1e4,   3e4, -3e4, infinity, -infinity, std::nan("")};
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      for (const DType dtype : kDtypes) {
        for (const double up : {1.0, -2.0, 0.0, infinity, std::nan("")}) {
          const auto n = static_cast<std::int64_t>(gates.size());
          const Tensor gate = from_data(gates, {n}, device).to(dtype);
          const Results got = run(op, {gate, full({n}, up, dtype, device), ones({n}, dtype, device)});
          const std::vector<double> x = to_vector<double>(gate);
          std::vector<double> y, dgate, dup;
          for (const double g : x) {
            y.push_back(op.value(g) * up);
            dgate.push_back(up * op.slope(g));
            dup.push_back(op.value(g));
          }
          const double rtol = std::max(2e-6, epsilon_of(dtype));
          // Values below the smallest normal number may be flushed to zero.
          const double atol = dtype == float16 ? 1e-7 : 1e-30;
          const std::string what = fmt::format("{} of {} on {}, up {}", op.name, dtype, device, up);
          const auto expect = [&](const Tensor& t, std::vector<double> expected, const char* name) {
            if (dtype == float16) {
              for (double& value : expected) {
                value = std::abs(value) > 65'520 ? std::copysign(infinity, value) : value;
              }
            }
            expect_close(t, expected, rtol, atol, what + ", " + name);
          };
          if (std::isinf(up)) {
            // Whether infinity is multiplied by 0 or by a tiny number depends on the dtype.
            const std::vector<double> got_y = to_vector<double>(got.y);
            for (std::size_t i = 0; i < y.size(); ++i) {
              y[i] = std::abs(op.value(x[i])) < 1e-30 ? got_y[i] : y[i];
            }
          }
          expect(got.y, y, "y");
          expect(got.dup, dup, "dup");
          if (std::isfinite(up)) {
            expect(got.dgate, dgate, "dgate");
          }
        }
      }
    }
  }
}

TEST(Gated, Gradcheck) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      for (const Shape& shape : {Shape{1}, Shape{3, 5}, Shape{2, 2, 4}}) {
        const Tensor gate = randn(shape, float64, device) * 2;
        const Tensor up = randn(shape, float64, device);
        EXPECT_TRUE(autograd::gradcheck(op.of_two, {gate, up}));
        EXPECT_TRUE(autograd::gradgradcheck(op.of_two, {gate, up}));
        const Tensor x = cat({gate, up}, -1);
        EXPECT_TRUE(autograd::gradcheck(op.of_halves, {x}));
        EXPECT_TRUE(autograd::gradgradcheck(op.of_halves, {x}));
      }
      // Differentiates only one of the two first gradients.
      const Tensor gate = randn({7}, float64, device);
      const Tensor up = randn({7}, float64, device);
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& g) { return op.of_two(g, up); }, {gate}));
      EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& u) { return op.of_two(gate, u); }, {up}));
    }
  }
}

TEST(Gated, SecondDerivativesOf16BitsAreOf16Bits) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      const Tensor x = randn({3, 8}, bfloat16, device).requires_grad_();
      const Tensor dx = autograd::grad({sum(op.of_halves(x))}, {x}, {}, {.create_graph = true})[0];
      EXPECT_EQ(dx.dtype(), bfloat16);
      const Tensor exact_x = x.detach().to(float64).requires_grad_();
      const Tensor exact_dx = autograd::grad({sum(op.of_halves(exact_x))}, {exact_x}, {}, {.create_graph = true})[0];
      const Tensor ddx = autograd::grad({sum(dx)}, {x})[0];
      const Tensor exact_ddx = autograd::grad({sum(exact_dx)}, {exact_x})[0];
      EXPECT_EQ(ddx.dtype(), bfloat16);
      expect_close(ddx, to_vector<double>(exact_ddx), 0.01, 0.01, op.name);
    }
  }
}

TEST(Gated, NoElementsHaveGradients) {
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      const Tensor x = empty({3, 0}, float32, device).requires_grad_();
      const Tensor dx = autograd::grad({sum(op.of_halves(x))}, {x}, {}, {.create_graph = true})[0];
      EXPECT_EQ(dx.shape(), (Shape{3, 0}));
      EXPECT_EQ(autograd::grad({sum(dx)}, {x})[0].shape(), (Shape{3, 0}));
      EXPECT_EQ(op.of_halves(empty({0, 6}, float32, device)).shape(), (Shape{0, 3}));
    }
  }
}

TEST(Gated, SameBitsInEveryRun) {
  manual_seed(6);
  const int threads = num_threads();
  for (const Device device : test_devices()) {
    for (const Op& op : ops()) {
      for (const DType dtype : kDtypes) {
        const Inputs in = random_inputs({97, 2056}, dtype, device);
        const Results once = run_halves(op, in);
        for (const int count : {1, 2, 3}) {
          set_num_threads(count);
          const Results again = run_halves(op, in);
          expect_same_bits(again.y, once.y, op.name);
          expect_same_bits(again.dgate, once.dgate, op.name);
          expect_same_bits(again.dup, once.dup, op.name);
        }
        set_num_threads(threads);
      }
    }
  }
}

// Both overloads with more elements than 32 bits can count, in packs and one by one.
TEST(Gated, MoreElementsThan32BitsCount) {
  if (!cuda_available()) {
    GTEST_SKIP() << "needs a GPU";
  }
  manual_seed(7);
  const Op op = ops()[0];
  const Device device = Device::cuda();
  try {
    for (const std::int64_t columns : {96, 95}) {
      const std::int64_t rows = (std::int64_t{1} << 32) / 96 + 77;
      const Tensor x = randn({rows, 2 * columns}, bfloat16, device).requires_grad_();
      const Tensor dy = randn({rows, columns}, bfloat16, device);
      const Tensor y = op.of_halves(x);
      y.backward(dy);
      for (const std::int64_t begin : {std::int64_t{0}, rows / 2 - 3, rows - 9}) {
        const Tensor part = rows_of(x.detach(), begin, 9).requires_grad_();
        const Tensor y_part = op.of_halves(part);
        y_part.backward(rows_of(dy, begin, 9));
        expect_same_bits(y_part.detach(), rows_of(y.detach(), begin, 9), "y");
        expect_same_bits(part.grad(), rows_of(x.grad(), begin, 9), "dx");
      }
    }
    const std::int64_t n = (std::int64_t{1} << 32) + 77;
    const Tensor gate = randn({n}, float16, device);
    const Tensor y = op.of_two(gate, gate);
    for (const std::int64_t begin : {std::int64_t{0}, n / 2 - 3, n - 1001}) {
      const Tensor part = as_strided(gate, {1001}, {1}, begin);
      expect_same_bits(op.of_two(part, part), as_strided(y, {1001}, {1}, begin), "y");
    }
  } catch (const OutOfMemory& error) {
    GTEST_SKIP() << error.what();
  }
}

TEST(Gated, Errors) {
  const Tensor x = ones({2, 4});
  expect_error(
      [&] {
        swiglu(x, ones({2, 3}));
      },
      "swiglu: expected up like gate, float32 [2, 4] on cpu, got float32 [2, 3]");
  expect_error([&] { geglu(x, ones({4})); }, "geglu: expected up like gate, float32 [2, 4] on cpu, got float32 [4]");
  expect_error([&] { geglu(x, ones({2, 4}, float64)); }, "geglu: expected up like gate");
  expect_error([&] { swiglu(ones({2, 4}, int64)); }, "swiglu: expected x of a floating dtype, got int64");
  expect_error([&] { geglu(ones({2}, int32), ones({2}, int32)); },
               "geglu: expected gate of a floating dtype, got int32");
  expect_error([&] { geglu(ones({2, 3})); }, "geglu: expected x with a last axis of even length, got shape [2, 3]");
  expect_error([&] { swiglu(ones({})); }, "swiglu: expected x with a last axis of even length, got shape []");
  expect_error([&] { swiglu(Tensor{}); }, "swiglu: expected a defined x, got an undefined one");
  expect_error([&] { swiglu(x, Tensor{}); }, "swiglu: expected a defined up, got an undefined one");
  if (cuda_available()) {
    expect_error([&] { swiglu(x, x.to(Device::cuda())); }, "on cpu, got float32 [2, 4] on cuda");
  }
}

TEST(Gated, ModulesCallTheFunctions) {
  manual_seed(8);
  const Tensor x = randn({3, 10});
  expect_same_bits(nn::SwiGLU{}(x), swiglu(x));
  expect_same_bits(nn::GEGLU{}(x), geglu(x));
  expect_same_bits(nn::GEGLU{GeluApproximation::tanh}(x), geglu(x, GeluApproximation::tanh));
}

}  // namespace gated_test
