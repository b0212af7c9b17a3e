#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace elementwise_test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The relative error of one rounding and of the function.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::float64: return 1e-13;
    case DType::float32: return 1e-6;
    case DType::float16: return 1e-3;
    default: return 8e-3;
  }
}

Tensor uniform(const Shape& shape, double low, double high, DType dtype = float64, Device device = Device::cpu()) {
  const Tensor x = rand(shape, float64);
  double* data = x.data<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    data[i] = low + (high - low) * data[i];
  }
  return x.to(device, dtype);
}

// A view with x's elements whose axes are stored in the opposite order, with a gap after every element.
Tensor strided_copy(const Tensor& x) {
  Strides strides = x.shape();
  std::int64_t step = 2;
  for (int axis = 0; axis < x.dim(); ++axis) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(x.shape()[axis], 1);
  }
  const Tensor result = as_strided(full({step + 1}, 0, x.dtype(), x.device()), x.shape(), strides, 1);
  copy_into(result, x);
  return result;
}

// A contiguous copy that starts one element into its memory, so that wide accesses are not aligned.
Tensor unaligned_copy(const Tensor& x) {
  const Tensor base = empty({x.numel() + 1}, x.dtype(), x.device());
  const Tensor result = as_strided(base, x.shape(), contiguous_strides(x.shape()), 1);
  copy_into(result, x);
  return result;
}

std::vector<double> mapped(const std::function<double(double)>& f, const Tensor& x) {
  std::vector<double> values = to_vector<double>(x);
  for (double& value : values) {
    value = f(value);
  }
  return values;
}

struct UnaryCase {
  const char* name;
  Tensor (*op)(const Tensor&);
  double (*reference)(double);
  double low, high;
  double atol = 1e-6;  // in float32, near zeros of the function
};

const UnaryCase kUnary[] = {
    {"neg", [](const Tensor& x) { return -x; }, [](double x) { return -x; }, -3, 3},
    {"exp", [](const Tensor& x) { return exp(x); }, [](double x) { return std::exp(x); }, -5, 5},
    {"log", [](const Tensor& x) { return log(x); }, [](double x) { return std::log(x); }, 0.1, 5},
    {"log1p", [](const Tensor& x) { return log1p(x); }, [](double x) { return std::log1p(x); }, -0.7, 5},
    {"expm1", [](const Tensor& x) { return expm1(x); }, [](double x) { return std::expm1(x); }, -3, 3},
    {"sin", [](const Tensor& x) { return sin(x); }, [](double x) { return std::sin(x); }, -9, 9},
    {"cos", [](const Tensor& x) { return cos(x); }, [](double x) { return std::cos(x); }, -9, 9},
    {"sqrt", [](const Tensor& x) { return sqrt(x); }, [](double x) { return std::sqrt(x); }, 0.1, 5},
    {"rsqrt", [](const Tensor& x) { return rsqrt(x); }, [](double x) { return 1 / std::sqrt(x); }, 0.1, 5},
    {"pow 2", [](const Tensor& x) { return pow(x, 2); }, [](double x) { return x * x; }, -3, 3},
    {"pow 3", [](const Tensor& x) { return pow(x, 3); }, [](double x) { return x * x * x; }, -3, 3},
    {"pow 0", [](const Tensor& x) { return pow(x, 0); }, [](double) { return 1.0; }, -3, 3},
    {"pow -1.5", [](const Tensor& x) { return pow(x, -1.5); }, [](double x) { return std::pow(x, -1.5); }, 0.3, 3},
    {"pow of 3", [](const Tensor& x) { return pow(3, x); }, [](double x) { return std::pow(3, x); }, -2, 2},
    {"tanh", [](const Tensor& x) { return tanh(x); }, [](double x) { return std::tanh(x); }, -4, 4},
    {"erf", [](const Tensor& x) { return erf(x); }, [](double x) { return std::erf(x); }, -3, 3},
    {"sigmoid", [](const Tensor& x) { return sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }, -6, 6},
    {"relu", [](const Tensor& x) { return relu(x); }, [](double x) { return std::max(x, 0.0); }, -3, 3},
    {"leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0.3); }, [](double x) { return x > 0 ? x : 0.3 * x; }, -3,
     3},
    {"elu", [](const Tensor& x) { return elu(x, 0.7); }, [](double x) { return x > 0 ? x : 0.7 * std::expm1(x); }, -3,
     3},
    {"softplus", [](const Tensor& x) { return softplus(x); }, [](double x) { return std::log1p(std::exp(x)); }, -6, 6},
    {"softplus, beta", [](const Tensor& x) { return softplus(x, 3); },
     [](double x) { return std::log1p(std::exp(3 * x)) / 3; }, -2, 2},
    {"softplus, threshold", [](const Tensor& x) { return softplus(x, 1, -7); }, [](double x) { return x; }, -6, 6},
    {"floor", [](const Tensor& x) { return floor(x); }, [](double x) { return std::floor(x); }, -6, 6},
    {"ceil", [](const Tensor& x) { return ceil(x); }, [](double x) { return std::ceil(x); }, -6, 6},
    {"round", [](const Tensor& x) { return round(x); }, [](double x) { return std::nearbyint(x); }, -6, 6},
    {"fmod number", [](const Tensor& x) { return fmod(x, 0.5); }, [](double x) { return std::fmod(x, 0.5); }, 0.6, 0.9},
    {"floor_divide number", [](const Tensor& x) { return floor_divide(x, 0.5); },
     [](double x) { return std::floor(x / 0.5); }, 0.6, 0.9},
    {"number fmod", [](const Tensor& x) { return fmod(2, x); }, [](double x) { return std::fmod(2, x); }, 0.7, 0.95},
    {"number floor_divide", [](const Tensor& x) { return floor_divide(2, x); },
     [](double x) { return std::floor(2 / x); }, 0.7, 0.95},
    {"silu", [](const Tensor& x) { return silu(x); }, [](double x) { return x / (1 + std::exp(-x)); }, -6, 6},
    {"abs", [](const Tensor& x) { return abs(x); }, [](double x) { return std::abs(x); }, -3, 3},
    {"clamp", [](const Tensor& x) { return clamp(x, -1, 2); },
     [](double x) { return std::min(std::max(x, -1.0), 2.0); }, -3, 3},
    {"gelu", [](const Tensor& x) { return gelu(x); },
     [](double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }, -5, 5},
    {"gelu tanh", [](const Tensor& x) { return gelu(x, GeluApproximation::tanh); },
     [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }, -5, 5},
    {"+ number", [](const Tensor& x) { return 1.5 + x; }, [](double x) { return x + 1.5; }, -3, 3},
    {"- number", [](const Tensor& x) { return x - 0.25; }, [](double x) { return x - 0.25; }, -3, 3},
    {"number -", [](const Tensor& x) { return 0.25 - x; }, [](double x) { return 0.25 - x; }, -3, 3},
    {"* number", [](const Tensor& x) { return 0.3 * x; }, [](double x) { return x * 0.3; }, -3, 3},
    {"/ number", [](const Tensor& x) { return x / 0.3; }, [](double x) { return x / 0.3; }, -3, 3},
    {"number /", [](const Tensor& x) { return 0.3 / x; }, [](double x) { return 0.3 / x; }, 0.2, 3},
    {"maximum number", [](const Tensor& x) { return maximum(x, 0.5); }, [](double x) { return std::max(x, 0.5); }, -3,
     3},
    {"minimum number", [](const Tensor& x) { return minimum(x, 0.5); }, [](double x) { return std::min(x, 0.5); }, -3,
     3},
};

TEST(Elementwise, UnaryValues) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const Shape& shape : {Shape{}, Shape{0, 3}, Shape{1}, Shape{7, 13}, Shape{2, 3, 4}, Shape{5, 4099}}) {
        for (const UnaryCase& c : kUnary) {
          const Tensor x = uniform(shape, c.low, c.high, dtype, device);
          const std::vector<double> expected = mapped(c.reference, x);
          const double rtol = tolerance(dtype);
          const double atol = dtype == float64 ? 1e-14 : dtype == float32 ? c.atol : rtol * 1e-2;
          for (const Tensor& input : {x, strided_copy(x), unaligned_copy(x)}) {
            const Tensor y = c.op(input);
            EXPECT_EQ(y.dtype(), dtype);
            EXPECT_EQ(y.shape(), shape);
            expect_close(y, expected, rtol, atol, c.name);
          }
        }
      }
    }
  }
}

TEST(Elementwise, UnaryGradients) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const UnaryCase& c : kUnary) {
      EXPECT_NO_THROW(autograd::gradcheck(c.op, {uniform({3, 5}, c.low, c.high, float64, device)})) << c.name;
    }
  }
}

// Derivatives in lower precision agree with those in float64.
TEST(Elementwise, UnaryGradientDtypes) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      for (const UnaryCase& c : kUnary) {
        const Tensor x = uniform({4, 33}, c.low, c.high, dtype, device).requires_grad_();
        const Tensor wide = x.detach().to(float64).requires_grad_();
        const Tensor dy = uniform({4, 33}, -1, 1, dtype, device);
        c.op(x).backward(dy);
        c.op(wide).backward(dy.to(float64));
        const double rtol = tolerance(dtype) * 10;
        expect_close(x.grad(), to_vector<double>(wide.grad()), rtol, rtol, c.name);
      }
    }
  }
}

TEST(Elementwise, KinksAndSpecialValues) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      const auto gradient = [&](const auto& op, std::initializer_list<double> values) {
        const Tensor x = from_data(values).to(device, dtype).requires_grad_();
        const Tensor y = op(x);
        y.backward(ones_like(y));
        return to_vector<double>(x.grad());
      };
      using Values = std::vector<double>;
      EXPECT_EQ(gradient([](const Tensor& x) { return relu(x); }, {-1, 0, 1}), (Values{0, 0, 1}));
      EXPECT_EQ(gradient([](const Tensor& x) { return leaky_relu(x, 0.25); }, {-1, 0, 1}), (Values{0.25, 0.25, 1}));
      EXPECT_EQ(gradient([](const Tensor& x) { return leaky_relu(x, -2); }, {-1, 1}), (Values{-2, 1}));
      EXPECT_EQ(gradient([](const Tensor& x) { return abs(x); }, {-1, 0, 1}), (Values{-1, 0, 1}));
      EXPECT_EQ(gradient([](const Tensor& x) { return clamp(x, 0, 1); }, {-1, 0, 0.5, 1, 2}), (Values{0, 1, 1, 1, 0}));
      EXPECT_EQ(gradient([](const Tensor& x) { return maximum(x, 1); }, {0, 1, 2}), (Values{0, 0.5, 1}));
      EXPECT_EQ(gradient([](const Tensor& x) { return minimum(x, 1); }, {0, 1, 2}), (Values{1, 0.5, 0}));
      EXPECT_EQ(gradient([](const Tensor& x) { return pow(x, 0); }, {0, 2}), (Values{0, 0}));
      EXPECT_EQ(gradient([](const Tensor& x) { return pow(x, 2); }, {0, 2}), (Values{0, 4}));
      EXPECT_EQ(gradient([](const Tensor& x) { return pow(0, x); }, {0, 2}), (Values{0, 0}));

      const Tensor special = from_data<double>({kNaN, kInfinity, -kInfinity, 0.0}).to(device, dtype);
      const auto expect = [&](const Tensor& y, const Values& expected) { expect_close(y, expected, 1e-6, 0); };
      expect(relu(special), {kNaN, kInfinity, 0, 0});
      expect(leaky_relu(special), {kNaN, kInfinity, -kInfinity, 0});
      expect(exp(special), {kNaN, kInfinity, 0, 1});
      expect(log(special), {kNaN, kInfinity, kNaN, -kInfinity});
      expect(tanh(special), {kNaN, 1, -1, 0});
      expect(sigmoid(special), {kNaN, 1, 0, 0.5});
      EXPECT_EQ(gradient([](const Tensor& x) { return elu(x, 0.5); }, {0, 1}), (Values{0.5, 1}));
      EXPECT_EQ(gradient([](const Tensor& x) { return floor(x); }, {-0.5, 0, 1.5}), (Values{0, 0, 0}));
      expect(softplus(special), {kNaN, kInfinity, 0, std::log(2.0)});
      expect(elu(special, 2), {kNaN, kInfinity, -2, 0});
      expect(log1p(special), {kNaN, kInfinity, kNaN, 0});
      expect(expm1(special), {kNaN, kInfinity, -1, 0});
      expect(sin(special), {kNaN, kNaN, kNaN, 0});
      expect(round(from_data<double>({0.5, 1.5, -2.5, 2.4}).to(device, dtype)), {0, 2, -2, 2});
      expect(log1p(from_data<double>({1e-10}).to(device, dtype)), {1e-10});
      expect(expm1(from_data<double>({1e-10}).to(device, dtype)), {1e-10});
      expect(clamp(special, -1, 1), {kNaN, 1, -1, 0});
      expect(maximum(special, 1), {kNaN, kInfinity, 1, 1});
      expect(minimum(special, full_like(special, 1)), {kNaN, 1, -kInfinity, 0});
      expect(maximum(full_like(special, 1), special), {kNaN, kInfinity, 1, 1});
    }
  }
}

// Derivatives that are a product of 0 and infinity.
TEST(Elementwise, GradientsWithoutZeroTimesInfinity) {
  using Values = std::vector<double>;
  for (const Device device : test_devices()) {
    // Where a function is constant, its gradient is 0, whatever comes after it.
    const std::vector<std::pair<const char*, std::function<Tensor(const Tensor&)>>> constant{
        {"relu", [](const Tensor& x) { return relu(x); }},
        {"leaky_relu", [](const Tensor& x) { return leaky_relu(x, 0); }},
        {"clamp", [](const Tensor& x) { return clamp(x, 0, 5); }},
        {"floor", [](const Tensor& x) { return floor(x) + 1; }},
        {"ceil", [](const Tensor& x) { return ceil(x); }},
        {"round", [](const Tensor& x) { return round(x); }},
        {"maximum", [](const Tensor& x) { return maximum(x, zeros_like(x)); }},
        {"minimum", [](const Tensor& x) { return -minimum(-x, 0); }},
        {"abs", [](const Tensor& x) { return abs(x * 0); }},
        {"linear",
         [](const Tensor& x) {
           return squeeze(linear(unsqueeze(x, 1), ones({1, 1}, x.dtype(), x.device()), {}, Activation::relu), 1);
         }},
    };
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const auto& [name, f] : constant) {
        const Tensor x = full({3}, -0.25, dtype, device).requires_grad_();
        const Tensor y = sqrt(f(x));
        expect_close(y, Values{0, 0, 0}, 0, 0, name);
        y.backward(ones_like(y));
        expect_close(x.grad(), Values{0, 0, 0}, 0, 0, name);
      }
      const auto second = [&](const std::function<Tensor(const Tensor&)>& f, std::initializer_list<double> values) {
        const Tensor x = from_data(values).to(device, dtype).requires_grad_();
        const Tensor dx = autograd::grad({f(x)}, {x}, {ones_like(x)}, {.create_graph = true})[0];
        return to_vector<double>(autograd::grad({sum(where(isfinite(dx), dx, 0))}, {x})[0]);
      };
      const Values none(4, 0.0);
      const double large = dtype == float16 ? 6e4 : 1e30;
      EXPECT_EQ(second([](const Tensor& x) { return erf(x); }, {large, -large, kInfinity, -kInfinity}), none);
      EXPECT_EQ(second([](const Tensor& x) { return gelu(x); }, {large, -large, 300, -300}), none);
      EXPECT_EQ(second([](const Tensor& x) { return gelu(x, GeluApproximation::tanh); }, {6e4, -6e4, 300, -300}), none);
      EXPECT_EQ(second([](const Tensor& x) { return silu(x); }, {large, -large, 300, 6e4}), none);
      EXPECT_EQ(second([](const Tensor& x) { return elu(x); }, {6e4, 300, -6e4, -kInfinity}), none);
    }
    // The derivative of elu's second derivative where exp(x) overflows.
    const Tensor x = full({1}, 1000, float64, device).requires_grad_();
    const Tensor dx = autograd::grad({elu(x)}, {x}, {ones_like(x)}, {.create_graph = true})[0];
    const Tensor ddx = autograd::grad({dx}, {x}, {ones_like(x)}, {.create_graph = true})[0];
    expect_close(autograd::grad({ddx}, {x}, {ones_like(x)})[0], Values{0}, 0, 0);
    // log″ where x² underflows
    const Tensor tiny = full({1}, 1e-30, float32, device).requires_grad_();
    const Tensor slope = autograd::grad({log(tiny)}, {tiny}, {ones_like(tiny)}, {.create_graph = true})[0];
    expect_close(autograd::grad({slope}, {tiny}, {zeros_like(tiny)})[0], Values{0}, 0, 0);
    // a⁰ = 1 for all a, and d²(0ᵇ)/db² is 0 for b > 0 and infinite for b < 0.
    const Tensor a = zeros({3}, float64, device).requires_grad_();
    const Tensor b = from_data<double>({0.0, 2.0, -1.0}, device).requires_grad_();
    const auto twice = [&](const Tensor& by) {
      const Tensor d = autograd::grad({pow(a, b)}, {by}, {ones_like(a)}, {.create_graph = true})[0];
      return to_vector<double>(autograd::grad({d}, {by}, {ones_like(a)})[0]);
    };
    EXPECT_EQ(twice(a), (Values{0, 2, kInfinity}));
    EXPECT_EQ(twice(b), (Values{0, 0, kInfinity}));
  }
}

struct BinaryCase {
  const char* name;
  Tensor (*op)(const Tensor&, const Tensor&);
  double (*reference)(double, double);
  bool integers;
};

const BinaryCase kBinary[] = {
    {"add", [](const Tensor& a, const Tensor& b) { return a + b; }, [](double a, double b) { return a + b; }, true},
    {"sub", [](const Tensor& a, const Tensor& b) { return a - b; }, [](double a, double b) { return a - b; }, true},
    {"mul", [](const Tensor& a, const Tensor& b) { return a * b; }, [](double a, double b) { return a * b; }, true},
    {"div", [](const Tensor& a, const Tensor& b) { return a / b; }, [](double a, double b) { return a / b; }, false},
    {"pow", [](const Tensor& a, const Tensor& b) { return pow(a, b); },
     [](double a, double b) { return std::pow(a, b); }, false},
    {"fmod", [](const Tensor& a, const Tensor& b) { return fmod(a, b); },
     [](double a, double b) { return std::fmod(a, b); }, true},
    {"floor_divide", [](const Tensor& a, const Tensor& b) { return floor_divide(a, b); },
     [](double a, double b) { return std::floor(a / b); }, true},
    {"maximum", [](const Tensor& a, const Tensor& b) { return maximum(a, b); },
     [](double a, double b) { return std::max(a, b); }, true},
    {"minimum", [](const Tensor& a, const Tensor& b) { return minimum(a, b); },
     [](double a, double b) { return std::min(a, b); }, true},
    {"eq", [](const Tensor& a, const Tensor& b) { return a == b; }, [](double a, double b) { return double(a == b); },
     true},
    {"ne", [](const Tensor& a, const Tensor& b) { return a != b; }, [](double a, double b) { return double(a != b); },
     true},
    {"lt", [](const Tensor& a, const Tensor& b) { return a < b; }, [](double a, double b) { return double(a < b); },
     true},
    {"le", [](const Tensor& a, const Tensor& b) { return a <= b; }, [](double a, double b) { return double(a <= b); },
     true},
    {"gt", [](const Tensor& a, const Tensor& b) { return a > b; }, [](double a, double b) { return double(a > b); },
     true},
    {"ge", [](const Tensor& a, const Tensor& b) { return a >= b; }, [](double a, double b) { return double(a >= b); },
     true},
};

// f(a, b) for tensors of up to three axes, by plain loops.
std::vector<double> broadcast(double (*f)(double, double), const Tensor& a, const Tensor& b, const Shape& shape) {
  const std::vector<double> x = to_vector<double>(a);
  const std::vector<double> y = to_vector<double>(b);
  const auto at = [&](const Tensor& t, const std::array<std::int64_t, 3>& index) {
    std::int64_t position = 0;
    for (int axis = 0; axis < t.dim(); ++axis) {
      const std::int64_t i = index[axis + shape.size() - t.dim()];
      position = position * t.shape()[axis] + (t.shape()[axis] == 1 ? 0 : i);
    }
    return position;
  };
  std::vector<double> result;
  const auto size = [&](int axis) { return axis < shape.size() ? shape[axis] : 1; };
  for (std::int64_t i = 0; i < size(0); ++i) {
    for (std::int64_t j = 0; j < size(1); ++j) {
      for (std::int64_t k = 0; k < size(2); ++k) {
        result.push_back(f(x[at(a, {i, j, k})], y[at(b, {i, j, k})]));
      }
    }
  }
  return result;
}

struct ShapePair {
  Shape a, b, out;
};

const ShapePair kShapes[] = {
    {{}, {}, {}},
    {{5}, {}, {5}},
    {{0, 3}, {3}, {0, 3}},
    {{3, 7}, {3, 7}, {3, 7}},
    {{3, 7}, {7}, {3, 7}},
    {{3, 1}, {3, 8}, {3, 8}},
    {{2, 1, 8}, {5, 1}, {2, 5, 8}},
    {{1, 5, 16}, {2, 1, 1}, {2, 5, 16}},
    {{4, 1, 3}, {1, 5, 1}, {4, 5, 3}},
    {{301, 67}, {1, 67}, {301, 67}},
};

TEST(Elementwise, BinaryValues) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8}) {
      for (const ShapePair& shapes : kShapes) {
        for (const BinaryCase& c : kBinary) {
          if (!is_floating(dtype) && !c.integers) {
            continue;
          }
          const bool floating = is_floating(dtype);
          const Tensor a =
              floating ? uniform(shapes.a, 0.3, 3, dtype, device) : randint(6, 12, shapes.a, dtype).to(device);
          const Tensor b =
              floating ? uniform(shapes.b, 0.3, 3, dtype, device) : randint(1, 7, shapes.b, dtype).to(device);
          const std::vector<double> expected = broadcast(c.reference, a, b, shapes.out);
          const double rtol = floating ? tolerance(dtype) : 0;
          for (const Tensor& x : {a, strided_copy(a), unaligned_copy(a)}) {
            for (const Tensor& y : {b, strided_copy(b)}) {
              const Tensor out = c.op(x, y);
              EXPECT_EQ(out.shape(), shapes.out);
              expect_close(out, expected, rtol, rtol, c.name);
            }
          }
        }
      }
    }
  }
}

TEST(Elementwise, BinaryGradients) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const ShapePair& shapes : {kShapes[1], kShapes[3], kShapes[4], kShapes[6], kShapes[8]}) {
      for (const BinaryCase& c : kBinary) {
        const Tensor a = uniform(shapes.a, 0.3, 3, float64, device);
        const Tensor b = uniform(shapes.b, 0.3, 3, float64, device);
        if (c.op(a, b).dtype() == boolean) {
          continue;
        }
        EXPECT_NO_THROW(autograd::gradcheck(c.op, {a, b})) << c.name;
      }
    }
  }
}

TEST(Elementwise, OnlyTheGradientsThatAreNeeded) {
  for (const BinaryCase& c : kBinary) {
    const Tensor a = uniform({2, 3}, 1, 2).requires_grad_();
    const Tensor b = uniform({3}, 1, 2);
    const Tensor y = c.op(a, b);
    if (y.dtype() == boolean) {
      EXPECT_FALSE(y.requires_grad()) << c.name;
      continue;
    }
    y.backward(ones_like(y));
    EXPECT_TRUE(a.grad().defined()) << c.name;
    EXPECT_FALSE(b.grad().defined()) << c.name;
  }
}

TEST(Elementwise, TiesShareTheGradient) {
  for (const Device device : test_devices()) {
    const Tensor a = from_data<double>({1.0, 2.0, 3.0}, device).requires_grad_();
    const Tensor b = from_data<double>({2.0, 2.0, 2.0}, device).requires_grad_();
    maximum(a, b).backward(ones_like(a));
    expect_close(a.grad(), std::vector<double>{0, 0.5, 1}, 0, 0);
    expect_close(b.grad(), std::vector<double>{1, 0.5, 0}, 0, 0);
  }
}

TEST(Elementwise, NumbersKeepTheirPrecisionBeside16Bits) {
  for (const Device device : test_devices()) {
    // If 0.1 were rounded to bfloat16 first, the product would be 0.90234375.
    EXPECT_EQ((full({1}, 9, bfloat16, device) * 0.1).item(), 0.8984375);
    EXPECT_EQ((full({1}, 0.1, bfloat16, device) == 0.1).item(), 1);
    EXPECT_EQ((full({1}, 0.1, float32, device) == 0.1).item(), 1);
  }
}

TEST(Elementwise, IntegerNumbers) {
  for (const Device device : test_devices()) {
    const Tensor x = arange(3, int64, device);
    expect_close(x * 2 - 1, std::vector<double>{-1, 1, 3}, 0, 0);
    expect_close(5 - x, std::vector<double>{5, 4, 3}, 0, 0);
    expect_close(full({2}, 9, uint8, device) - 3, std::vector<double>{6, 6}, 0, 0);
    expect_close(x > 1, std::vector<double>{0, 0, 1}, 0, 0);
    // An integer that a double cannot represent.
    const std::int64_t big = (std::int64_t{1} << 53) + 1;
    EXPECT_EQ(to_vector<std::int64_t>(from_data({big}, device) + from_data({big}, device))[0], 2 * big);
  }
}

TEST(Elementwise, IntegerDivision) {
  constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
  for (const Device device : test_devices()) {
    const Tensor a = from_data<std::int64_t>({7, -7, 7, -7, 6, 5, kLowest, kLowest}, device);
    const Tensor b = from_data<std::int64_t>({2, 2, -2, -2, -3, 0, -1, 1}, device);
    EXPECT_EQ(to_vector<std::int64_t>(floor_divide(a, b)),
              (std::vector<std::int64_t>{3, -4, -4, 3, -2, 0, kLowest, kLowest}));
    EXPECT_EQ(to_vector<std::int64_t>(fmod(a, b)), (std::vector<std::int64_t>{1, -1, 1, -1, 0, 0, 0, 0}));
    EXPECT_EQ(to_vector<int>(floor_divide(full({1}, 200, uint8, device), 7)), std::vector<int>{28});
  }
}

TEST(Elementwise, FloatingRemaindersAndQuotients) {
  for (const Device device : test_devices()) {
    const Tensor a = from_data<double>({7.5, -7.5, 7.5, -7.5, 1.0, 0.0, kInfinity, 5.0}, device);
    const Tensor b = from_data<double>({2.0, 2.0, -2.0, -2.0, 0.1, 3.0, 2.0, kInfinity}, device);
    expect_close(fmod(a, b), std::vector<double>{1.5, -1.5, 1.5, -1.5, std::fmod(1.0, 0.1), 0, kNaN, 5}, 0, 0);
    // The quotient 1 / 0.1 rounds up to 10, although ten times the double 0.1 is more than 1.
    expect_close(floor_divide(a, b), std::vector<double>{3, -4, -4, 3, 9, 0, kNaN, 0}, 0, 0);
    expect_close(floor_divide(from_data<double>({1.0, -1.0, 0.0}, device), 0.0),
                 std::vector<double>{kInfinity, -kInfinity, kNaN}, 0, 0);
  }
}

TEST(Elementwise, NaNAndInfinityAreRecognized) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x = from_data<double>({kNaN, kInfinity, -kInfinity, 0.0, -1.0}).to(device, dtype);
      expect_close(isnan(x), std::vector<double>{1, 0, 0, 0, 0}, 0, 0);
      expect_close(isfinite(x), std::vector<double>{0, 0, 0, 1, 1}, 0, 0);
    }
    expect_close(isnan(arange(2, int64, device)), std::vector<double>{0, 0}, 0, 0);
    expect_close(isfinite(arange(2, uint8, device)), std::vector<double>{1, 1}, 0, 0);
  }
}

TEST(Elementwise, Logical) {
  for (const Device device : test_devices()) {
    const Tensor a = from_data({false, false, true, true}, device);
    const Tensor b = from_data({false, true, false, true}, device);
    expect_close(logical_and(a, b), std::vector<double>{0, 0, 0, 1}, 0, 0);
    expect_close(logical_or(a, b), std::vector<double>{0, 1, 1, 1}, 0, 0);
    expect_close(logical_not(a), std::vector<double>{1, 1, 0, 0}, 0, 0);
    expect_close(a == b, std::vector<double>{1, 0, 0, 1}, 0, 0);
    expect_close(logical_and(a, full({2, 1}, 1, boolean, device)), std::vector<double>{0, 0, 1, 1, 0, 0, 1, 1}, 0, 0);
  }
}

TEST(Elementwise, Comparisons) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data<double>({kNaN, 1.0, 2.0, 3.0}, device);
    expect_close(x == 2, std::vector<double>{0, 0, 1, 0}, 0, 0);
    expect_close(x != 2, std::vector<double>{1, 1, 0, 1}, 0, 0);
    expect_close(x < 2, std::vector<double>{0, 1, 0, 0}, 0, 0);
    expect_close(x <= 2, std::vector<double>{0, 1, 1, 0}, 0, 0);
    expect_close(x > 2, std::vector<double>{0, 0, 0, 1}, 0, 0);
    expect_close(x >= 2, std::vector<double>{0, 0, 1, 1}, 0, 0);
  }
}

TEST(Elementwise, Where) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8, boolean}) {
      const Tensor condition = from_data({true, false, true, false, false, true}, {3, 2}, device);
      const Tensor a = from_data<double>({1.0, 0.0}).to(device, dtype);
      const Tensor b = from_data<double>({0.0, 1.0, 0.0}, {3, 1}).to(device, dtype);
      expect_close(where(condition, a, b), std::vector<double>{1, 0, 1, 1, 0, 0}, 0, 0);
      expect_close(where(condition, a, 1), std::vector<double>{1, 1, 1, 1, 1, 0}, 0, 0);
      expect_close(where(condition, 1, b), std::vector<double>{1, 0, 1, 1, 0, 1}, 0, 0);
    }
    const Tensor condition = rand({3, 4}, float64, device) < 0.5;
    EXPECT_TRUE(autograd::gradcheck([&](const Tensor& a, const Tensor& b) { return where(condition, a, b); },
                                    {randn({4}, float64, device), randn({2, 3, 1}, float64, device)}));
    EXPECT_TRUE(
        autograd::gradcheck([&](const Tensor& a) { return where(condition, a, 2); }, {randn({4}, float64, device)}));
    EXPECT_TRUE(
        autograd::gradcheck([&](const Tensor& b) { return where(condition, 2, b); }, {randn({3, 1}, float64, device)}));
  }
}

TEST(Elementwise, MaskedFill) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.f, 2.f, 3.f, 4.f}, {2, 2}, device);
    const Tensor mask = from_data({true, false}, device);
    expect_close(masked_fill(x, mask, -kInfinity), std::vector<double>{-kInfinity, 2, -kInfinity, 4}, 0, 0);
    EXPECT_TRUE(autograd::gradcheck([&](const Tensor& a) { return masked_fill(a, mask, 7); },
                                    {randn({2, 2}, float64, device)}));
    expect_error([&] { masked_fill(x, full({3, 1, 1}, 1, boolean, device), 0); }, "masked_fill: expected a mask");
  }
}

TEST(Elementwise, Errors) {
  const Tensor x = ones({2, 3});
  expect_error([&] { x + ones({2}); }, "add: shapes [2, 3] and [2] do not broadcast");
  expect_error([&] { x* ones({2, 3}, float64); }, "mul: expected tensors of one dtype, got float32 and float64");
  expect_error([&] { exp(ones({2}, int64)); }, "exp: expected a floating dtype, got int64");
  expect_error([&] { neg(ones({2}, uint8)); }, "neg: expected a signed dtype, got uint8");
  expect_error([&] { clamp(x, 1, 0); }, "clamp: expected low <= high, got 1 and 0");
  expect_error([&] { softplus(x, 0); }, "softplus: expected beta != 0");
  expect_error([&] { sin(ones({2}, int64)); }, "sin: expected a floating dtype, got int64");
  expect_error([&] { fmod(ones({2}, int64), 0.5); }, "fmod: 0.5 is not representable in int64");
  expect_error([&] { floor_divide(ones({2}, boolean), ones({2}, boolean)); }, "floor_divide: dtype bool");
  expect_error([&] { clamp(x, kNaN, 0); }, "clamp: expected low <= high");
  expect_error([&] { ones({2}, int64) + 0.5; }, "add: 0.5 is not representable in int64");
  expect_error([&] { ones({2}, uint8) * 256; }, "mul: 256 is not representable in uint8");
  expect_error([&] { lt(ones({2}, int64), 1e19); }, "lt: 1e+19 is not representable in int64");
  expect_error([&] { ones({2}, int64) / ones({2}, int64); }, "div: dtype int64 is not supported");
  expect_error([&] { ones({2}, boolean) + ones({2}, boolean); }, "add: dtype bool is not supported");
  expect_error([&] { where(x, x, x); }, "where: expected a condition of bool, got float32");
  expect_error([&] { where(x > 0, x, x.to(float64)); }, "where: expected tensors of one dtype");
  expect_error([&] { logical_and(x, x); }, "logical_and: expected bool, got float32");
  expect_error([&] { exp(Tensor{}); }, "undefined");
  expect_error([&] { gelu(x, static_cast<GeluApproximation>(2)); }, "gelu: expected the approximation none or tanh");
  for (const Device device : test_devices()) {
    if (device.is_cuda()) {
      expect_error(
          [&] {
            x + ones({2, 3}, float32, device);
          },
          "add: expected tensors on one device, got cpu and cuda:0");
    }
  }
}

TEST(Binary, IntegersWrapAround) {
  const auto same = [](const Tensor& got, const auto& expected) {
    using T = typename std::decay_t<decltype(expected)>::value_type;
    EXPECT_EQ(to_vector<T>(got), expected);
  };
  for (const Device device : test_devices()) {
    using Longs = std::vector<std::int64_t>;
    const Tensor x = from_data<std::int64_t>({INT64_MAX, INT64_MIN, std::int64_t{3'037'000'500}}, device);
    same(x + x, Longs{-2, 0, 6'074'001'000});
    same(x + 1, Longs{INT64_MIN, INT64_MIN + 1, 3'037'000'501});
    same(x - from_data<std::int64_t>({-1, 1, 0}, device), Longs{INT64_MIN, INT64_MAX, 3'037'000'500});
    same(-1 - x, Longs{INT64_MIN, INT64_MAX, -3'037'000'501});
    same(x * x, Longs{1, 0, -9'223'372'036'709'301'616});
    same(x * 2, Longs{-2, 0, 6'074'001'000});
    same(neg(x), Longs{-INT64_MAX, INT64_MIN, -3'037'000'500});

    using Ints = std::vector<std::int32_t>;
    const Tensor y = from_data<std::int32_t>({INT32_MAX, INT32_MIN, 65'536}, device);
    same(y + y, Ints{-2, 0, 131'072});
    same(y - 1, Ints{INT32_MAX - 1, INT32_MAX, 65'535});
    same(y * y, Ints{1, 0, 0});
    same(neg(y), Ints{-INT32_MAX, INT32_MIN, -65'536});
    const Tensor z = from_data<std::uint8_t>({200, 255}, device);
    same(z + z, std::vector<std::uint8_t>{144, 254});
    same(z * z, std::vector<std::uint8_t>{64, 1});
    same(0 - z, std::vector<std::uint8_t>{56, 1});
  }
}

}  // namespace elementwise_test
