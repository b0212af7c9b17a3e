#include <gtest/gtest.h>

#include "tests/depth.h"
#include "tests/ops/matrix_layouts.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/autograd/hooks.h>
#include <mica/core/parallel.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace linear_test {

struct Function {
  Activation activation;
  const char* name;
  double (*value)(double);
  double (*slope)(double);
  double bend = 0;  // an upper bound of |z f''(z)|, the error of the slope in units of z's relative error
};

double cdf(double z) { return 0.5 * (1 + std::erf(z * M_SQRT1_2)); }
double tanh_cdf(double z) { return 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z))); }

const Function kNone{Activation::none, "none", [](double z) { return z; }, [](double) { return 1.0; }};
const Function kFunctions[] = {
    kNone,
    {Activation::relu, "relu", [](double z) { return std::max(z, 0.0); }, [](double z) { return z > 0 ? 1.0 : 0.0; }},
    {Activation::leaky_relu, "leaky_relu", [](double z) { return z > 0 ? z : 0.01 * z; },
     [](double z) { return z > 0 ? 1 : 0.01; }},
    {Activation::gelu, "gelu", [](double z) { return z * cdf(z); },
     [](double z) { return cdf(z) + z * std::exp(-0.5 * z * z) / std::sqrt(2 * M_PI); }, 0.34},
    {Activation::gelu_tanh, "gelu_tanh", [](double z) { return z * tanh_cdf(z); },
     [](double z) {
       const double p = tanh_cdf(z);
       return p + z * 2 * p * (1 - p) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
     },
     0.34},
};

// y, dx, dweight and dbias by their definitions, for x (rows, in). And for each gradient, the size of its sum's terms:
// the root of the sum of their squares. If terms are rounded independently, the error of the sum is proportional to
// that.
struct Reference {
  std::vector<double> y, dx, dweight, dbias;
  std::vector<double> dx_size, dweight_size, dbias_size;
};

// Gradients of the layer's sums z that are smaller than `least` count as `least` in these sizes.
Reference reference(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& dy,
                    const Function& f = kNone, double least = 0) {
  const std::int64_t out = weight.size(0), in = weight.size(1), rows = dy.numel() / out;
  const std::vector<double> x_values = to_vector<double>(x), weights = to_vector<double>(weight);
  const std::vector<double> gs = to_vector<double>(dy);
  const std::vector<double> bs = bias.defined() ? to_vector<double>(bias) : std::vector<double>(out);
  const auto zeros_of = [](std::int64_t n) { return std::vector<double>(n); };
  Reference r{zeros_of(rows * out), zeros_of(rows * in), zeros_of(out * in), zeros_of(out),
              zeros_of(rows * in),  zeros_of(out * in),  zeros_of(out)};
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < out; ++j) {
      // Pointers, since tests are not optimized.
      const double *const xs = x_values.data() + i * in, *const ws = weights.data() + j * in;
      double *const dx = r.dx.data() + i * in, *const dx_size = r.dx_size.data() + i * in;
      double *const dweight = r.dweight.data() + j * in, *const dweight_size = r.dweight_size.data() + j * in;
      double z = bs[j];
      for (std::int64_t k = 0; k < in; ++k) {
        z += xs[k] * ws[k];
      }
      r.y[i * out + j] = f.value(z);
      const double g = gs[i * out + j] * f.slope(z);
      const double size = std::max(std::abs(gs[i * out + j]) * (std::abs(f.slope(z)) + f.bend), least);
      r.dbias[j] += g;
      r.dbias_size[j] += size * size;
      for (std::int64_t k = 0; k < in; ++k) {
        dx[k] += g * ws[k];
        dx_size[k] += size * ws[k] * size * ws[k];
        dweight[k] += g * xs[k];
        dweight_size[k] += size * xs[k] * size * xs[k];
      }
    }
  }
  for (std::vector<double>* const sizes : {&r.dx_size, &r.dweight_size, &r.dbias_size}) {
    for (double& size : *sizes) {
      size = std::sqrt(size);
    }
  }
  return r;
}

TEST(Linear, MatchesDefinition) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const double rtol = dtype == float64 ? 1e-12 : dtype == float32 ? 1e-4 : dtype == float16 ? 2e-3 : 2e-2;
      const double atol = dtype == float64 ? 1e-12 : 5e-5;
      for (const Shape& leading : {Shape{}, Shape{1}, Shape{19}, Shape{3, 5}, Shape{2, 3, 4}}) {
        for (const bool with_bias : {true, false}) {
          Shape shape = leading;
          shape.push_back(40);
          Shape out_shape = leading;
          out_shape.push_back(35);
          const Tensor x = randn(shape, dtype, device).requires_grad_();
          const Tensor weight = randn({35, 40}, dtype, device).requires_grad_();
          const Tensor bias = with_bias ? randn({35}, dtype, device).requires_grad_() : Tensor{};
          const Tensor dy = randn(out_shape, dtype, device);
          const Tensor y = linear(x, weight, bias);
          ASSERT_EQ(y.shape(), out_shape);
          y.backward(dy);
          const Reference expected = reference(x, weight, bias, dy);
          const std::string what = std::string(name_of(dtype)) + " on " + to_string(device) + " " + to_string(shape);
          expect_close(y, expected.y, rtol, atol, what + " y");
          expect_close(x.grad(), expected.dx, rtol, atol, what + " dx");
          expect_close(weight.grad(), expected.dweight, rtol, atol, what + " dweight");
          if (with_bias) {
            expect_close(bias.grad(), expected.dbias, rtol, atol, what + " dbias");
          }
        }
      }
    }
  }
}

TEST(Linear, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor weight = randn({3, 4}, float64, device), bias = randn({3}, float64, device);
    for (const Shape& shape : {Shape{4}, Shape{1, 4}, Shape{5, 4}, Shape{2, 3, 4}}) {
      const Tensor x = randn(shape, float64, device);
      for (const Function& f : kFunctions) {
        SCOPED_TRACE(std::string(f.name) + " of " + to_string(shape) + " on " + to_string(device));
        const auto with_bias = [&](const Tensor& a, const Tensor& w, const Tensor& b) {
          return linear(a, w, b, f.activation);
        };
        const auto without = [&](const Tensor& a, const Tensor& w) { return linear(a, w, {}, f.activation); };
        EXPECT_TRUE(autograd::gradcheck(with_bias, {x, weight, bias}));
        EXPECT_TRUE(autograd::gradcheck(without, {x, weight}));
        EXPECT_TRUE(autograd::gradgradcheck(with_bias, {x, weight, bias}));
        EXPECT_TRUE(autograd::gradgradcheck(without, {x, weight}));
        // With a single input that requires a gradient, since tensors that only other gradients need are not saved.
        EXPECT_TRUE(
            autograd::gradgradcheck([&](const Tensor& a) { return linear(a, weight, bias, f.activation); }, {x}));
        EXPECT_TRUE(
            autograd::gradgradcheck([&](const Tensor& w) { return linear(x, w, bias, f.activation); }, {weight}));
        EXPECT_TRUE(
            autograd::gradgradcheck([&](const Tensor& b) { return linear(x, weight, b, f.activation); }, {bias}));
      }
    }
  }
}

// Random numbers with few bits, some of them 0, so that sums of their products are exact in every dtype.
Tensor coarse(const Shape& shape, DType dtype, Device device) {
  return (randint(-16, 17, shape, int64, device).to(float64) * 0.125).to(dtype);
}

// Expects values within `tolerance`, relative to each value and to the largest or, if all are small, to the sums'
// terms.
void expect_near(const Tensor& got, const std::vector<double>& expected, double tolerance, const std::string& what) {
  double largest = 1;
  for (const double value : expected) {
    largest = std::max(largest, std::abs(value));
  }
  expect_close(got, expected, tolerance, tolerance * largest, what);
}

// Expects sums within `tolerance`, relative to each value and to the size of its terms.
void expect_sums(const Tensor& got, const std::vector<double>& expected, const std::vector<double>& sizes,
                 double tolerance, const std::string& what) {
  std::vector<double> limits(expected.size());
  for (std::size_t i = 0; i < limits.size(); ++i) {
    limits[i] = tolerance * (std::abs(expected[i]) + sizes[i]);
  }
  expect_rows_close(got, expected, limits, 1, 1, what);
}

// In 16 bits, the sums z and their gradient are rounded, each with a relative error of up to half an epsilon; the root
// mean square is 0.4 of that. Two epsilons are five times the error of both together.
double tolerance(DType dtype) { return dtype == float64 ? 1e-13 : dtype == float32 ? 1e-5 : 2 * epsilon_of(dtype); }

TEST(LinearActivation, MatchesDefinition) {
  OneIn seven(7);
  const std::vector<std::array<std::int64_t, 3>> sizes{{1, 1, 1},   {3, 17, 255}, {255, 3, 17}, {17, 255, 3},
                                                       {1, 64, 48}, {255, 17, 1}, {40, 64, 48}, {128, 256, 64}};
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const auto& [rows, in, out] : sizes) {
        const Tensor x = coarse({rows, in}, dtype, device);
        const Tensor weight = coarse({out, in}, dtype, device);
        const Tensor dy = randn({rows, out}, dtype, device);
        for (const Function& f : kFunctions) {
          for (const bool with_bias : {true, false}) {
            if (seven.skips()) {
              continue;
            }
            const Tensor bias = with_bias ? coarse({out}, dtype, device) : Tensor{};
            // Near 0, the spacing of float16 is 2⁻²⁴. For values of this size, half of that is `tolerance`.
            const double least = dtype == float16 ? 0x1p-25 / tolerance(dtype) : 0;
            const Reference expected = reference(x, weight, bias, dy, f, least);
            for (const bool odd_layout : {false, true}) {
              const auto lie = [&](const Tensor& t, auto layout) { return (odd_layout ? layout(t) : t).detach(); };
              const Tensor a = lie(x, padded).requires_grad_();
              const Tensor w = lie(weight, stored_transposed).requires_grad_();
              const Tensor b = with_bias ? lie(bias, padded).requires_grad_() : Tensor{};
              const Tensor y = linear(a, w, b, f.activation);
              y.backward(lie(dy, stored_transposed));
              const std::string what = fmt::format("{} of {} x {} x {} {} on {}{}{}", f.name, rows, in, out, dtype,
                                                   device, with_bias ? ", bias" : "", odd_layout ? ", odd layout" : "");
              expect_near(y, expected.y, tolerance(dtype) / 2, what + " y");
              expect_sums(a.grad(), expected.dx, expected.dx_size, tolerance(dtype), what + " dx");
              expect_sums(w.grad(), expected.dweight, expected.dweight_size, tolerance(dtype), what + " dweight");
              if (with_bias) {
                expect_sums(b.grad(), expected.dbias, expected.dbias_size, tolerance(dtype), what + " dbias");
              }
              // Without gradients, another kernel may be used.
              const Tensor alone = linear(a.detach(), w.detach(), with_bias ? b.detach() : b, f.activation);
              expect_near(alone, expected.y, tolerance(dtype) / 2, what + " y alone");
            }
          }
        }
      }
    }
  }
}

// The product needs one bit more than 16-bit floats have, so that rounding it before adding the bias would show.
TEST(LinearActivation, BiasIsAPartOfTheSum) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      const double large = dtype == float16 ? 2048 : 256;
      for (const std::int64_t rows : {1, 19, 128}) {
        for (const std::int64_t in : {3, 40, 1024}) {
          for (const std::int64_t out : {1, 35, 64, 520}) {
            const Tensor x = zeros({rows, in}, dtype, device);
            fill_data(slice(x, 1, 0, 1), large);
            fill_data(slice(x, 1, 1, 2), 1);
            const Tensor weight = ones({out, in}, dtype, device), bias = full({out}, -large, dtype, device);
            for (const Function& f : kFunctions) {
              const std::string what = fmt::format("{} of {} x {} x {} {} on {}", f.name, rows, in, out, dtype, device);
              const Tensor y = linear(x, weight, bias, f.activation);
              expect_close(y, std::vector<double>(rows * out, f.value(1)), 4e-3, 0, what);
            }
          }
        }
      }
    }
  }
}

TEST(LinearActivation, IsTheActivationOfTheSums) {
  const auto of = [](Activation activation, const Tensor& z) {
    switch (activation) {
      case Activation::relu: return relu(z);
      case Activation::leaky_relu: return leaky_relu(z);
      case Activation::gelu: return gelu(z);
      case Activation::gelu_tanh: return gelu(z, GeluApproximation::tanh);
      default: return z;
    }
  };
  for (const DType dtype : {float64, float32, float16, bfloat16}) {
    for (const Function& f : kFunctions) {
      const Tensor dy = randn({2, 9, 33}, dtype);
      const auto run = [&](const auto& function, const Tensors& values) {
        const Tensors leaves{values[0].detach().requires_grad_(), values[1].detach().requires_grad_(),
                             values[2].detach().requires_grad_()};
        const Tensor y = function(leaves[0], leaves[1], leaves[2]);
        y.backward(dy);
        return Tensors{y.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
      };
      const Tensors values{randn({2, 9, 70}, dtype), randn({33, 70}, dtype), randn({33}, dtype)};
      const Tensors fused =
          run([&](const Tensor& x, const Tensor& w, const Tensor& b) { return linear(x, w, b, f.activation); }, values);
      const Tensors steps = run(
          [&](const Tensor& x, const Tensor& w, const Tensor& b) { return of(f.activation, linear(x, w, b)); }, values);
      for (std::size_t i = 0; i < fused.size(); ++i) {
        EXPECT_TRUE(same_bits(fused[i], steps[i])) << f.name << " " << name_of(dtype) << " " << i;
      }
    }
  }
}

TEST(LinearActivation, SpecialValues) {
  const double kInfinity = INFINITY;
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      // Rows whose sums are NaN, ∞, −∞ or 0, of sizes that the fused kernels support.
      const Tensor x = zeros({64, 64}, dtype, device), weight = zeros({64, 64}, dtype, device);
      fill_data(slice(select(x, 1, 0), 0, 0, 1), NAN);
      fill_data(slice(select(x, 1, 0), 0, 1, 2), kInfinity);
      fill_data(slice(select(x, 1, 0), 0, 2, 3), -kInfinity);
      fill_data(select(weight, 1, 0), 1);
      const auto first = [&](Activation activation) {
        const std::vector<double> all = to_vector<double>(linear(x, weight, zeros({64}, dtype, device), activation));
        return std::vector<double>{all[0], all[64], all[128], all[192]};
      };
      const auto expect = [&](Activation activation, const std::vector<double>& expected) {
        const std::vector<double> got = first(activation);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i])))
              << name_of(dtype) << " on " << to_string(device) << ", activation " << static_cast<int>(activation)
              << ", row " << i << ": " << got[i];
        }
      };
      expect(Activation::none, {NAN, kInfinity, -kInfinity, 0});
      expect(Activation::relu, {NAN, kInfinity, 0, 0});
      expect(Activation::leaky_relu, {NAN, kInfinity, -kInfinity, 0});
    }
  }
}

TEST(LinearActivation, RunsAreIdentical) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      for (const Function& f : kFunctions) {
        const Tensor values = randn({130, 520}, dtype, device), matrix = randn({72, 520}, dtype, device);
        const Tensor row = randn({72}, dtype, device), dy = randn({130, 72}, dtype, device);
        const auto run = [&] {
          const Tensor x = values.detach().requires_grad_(), weight = matrix.detach().requires_grad_();
          const Tensor bias = row.detach().requires_grad_();
          const Tensor y = linear(x, weight, bias, f.activation);
          y.backward(dy);
          return Tensors{y.detach(), x.grad(), weight.grad(), bias.grad()};
        };
        const Tensors one = run(), other = run();
        for (std::size_t i = 0; i < one.size(); ++i) {
          EXPECT_TRUE(same_bits(one[i], other[i])) << f.name << " " << name_of(dtype) << " " << i;
        }
      }
    }
  }
}

TEST(LinearActivation, Empty) {
  for (const Device device : test_devices()) {
    for (const Function& f : kFunctions) {
      const Tensor weight = ones({3, 4}, float32, device).requires_grad_();
      const Tensor bias = ones({3}, float32, device).requires_grad_();
      const Tensor none = empty({2, 0, 4}, float32, device).requires_grad_();
      const Tensor y = linear(none, weight, bias, f.activation);
      EXPECT_EQ(y.shape(), (Shape{2, 0, 3}));
      y.backward(empty({2, 0, 3}, float32, device));
      EXPECT_EQ(none.grad().shape(), none.shape());
      expect_close(weight.grad(), std::vector<double>(12, 0.0), 0, 0);
      expect_close(bias.grad(), std::vector<double>(3, 0.0), 0, 0);
      // If `in` is 0, y is the activation of the bias.
      const Tensor half = full({3}, -0.5, float32, device).requires_grad_();
      const Tensor left = linear(empty({2, 0}, float32, device), empty({3, 0}, float32, device), half, f.activation);
      expect_close(left, std::vector<double>(6, f.value(-0.5)), 1e-6, 0, f.name);
      left.backward(ones({2, 3}, float32, device));
      expect_close(half.grad(), std::vector<double>(3, 2 * f.slope(-0.5)), 1e-6, 0, f.name);
    }
  }
}

// Only tensors that a required gradient needs are saved for backward.
TEST(Linear, KeepsOnlyWhatGradientsNeed) {
  const Tensor x = randn({5, 4}), weight = randn({3, 4}), bias = randn({3}), dy = ones({5, 3});
  for (const Function& f : kFunctions) {
    const Tensor a = x.detach().requires_grad_();
    const Tensor w = clone(weight);
    const Tensor y = linear(a, w, bias, f.activation);
    fill_(a.detach(), 0);  // only dweight depends on x
    y.backward(dy);
    const Tensor b = clone(weight).requires_grad_();
    const Tensor other = linear(x, b, bias, f.activation);
    no_grad([&] { return fill_(b, 0); });
    other.backward(dy);
    EXPECT_TRUE(b.grad().defined());
  }
}

TEST(Linear, OnlyTheGradientsAskedFor) {
  const Tensor x = randn({5, 4}), weight = randn({3, 4}), bias = randn({3}).requires_grad_();
  linear(x, weight, bias).backward(ones({5, 3}));
  expect_close(bias.grad(), {5, 5, 5}, 0, 0);
  EXPECT_FALSE(x.grad().defined());
  EXPECT_FALSE(weight.grad().defined());
}

TEST(Linear, NonContiguousInputs) {
  for (const Device device : test_devices()) {
    const Tensor x = transpose(randn({2, 40, 5}, float32, device), 1, 2);  // (2, 5, 40)
    const Tensor weight = transpose(randn({40, 7}, float32, device), 0, 1);
    const Tensor bias = slice(randn({15}, float32, device), 0, 1, 15, 2);
    const Tensor y = linear(x, weight, bias);
    expect_close(y, linear(contiguous(x), contiguous(weight), contiguous(bias)), 1e-5, 1e-5);
    expect_close(y, reference(x, weight, bias, y).y, 1e-4, 1e-5);
  }
}

TEST(Linear, Empty) {
  for (const Device device : test_devices()) {
    const Tensor weight = ones({3, 4}, float32, device).requires_grad_();
    const Tensor bias = ones({3}, float32, device).requires_grad_();
    const Tensor x = empty({2, 0, 4}, float32, device).requires_grad_();
    const Tensor y = linear(x, weight, bias);
    EXPECT_EQ(y.shape(), (Shape{2, 0, 3}));
    y.backward(empty({2, 0, 3}, float32, device));
    EXPECT_EQ(x.grad().shape(), x.shape());
    expect_close(weight.grad(), std::vector<double>(12, 0.0), 0, 0);
    expect_close(bias.grad(), std::vector<double>(3, 0.0), 0, 0);
    // If `in` is 0, y is the bias.
    const Tensor only_bias = linear(empty({2, 0}, float32, device), empty({3, 0}, float32, device), bias);
    expect_close(only_bias, std::vector<double>(6, 1.0), 0, 0);
  }
}

TEST(Linear, ThreadsDoNotChangeBits) {
  const int before = num_threads();
  const Tensor dy = randn({150, 96});
  const auto run = [&](const Tensor& x, const Tensor& weight, const Tensor& bias, int threads) {
    set_num_threads(threads);
    const Tensors leaves{x.detach().requires_grad_(), weight.detach().requires_grad_(), bias.detach().requires_grad_()};
    const Tensor y = linear(leaves[0], leaves[1], leaves[2]);
    y.backward(dy);
    return Tensors{y.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
  };
  const Tensor x = randn({150, 70}), weight = randn({96, 70}), bias = randn({96});
  const Tensors one = run(x, weight, bias, 1);
  const Tensors five = run(x, weight, bias, 5);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_TRUE(same_bits(one[i], five[i])) << i;
  }
  set_num_threads(before);
}

TEST(Linear, Errors) {
  const Tensor x = ones({2, 4}), weight = ones({3, 4});
  expect_error([&] { linear(x, ones({4})); }, "linear: expected weight of shape (out, in), got [4]");
  expect_error([&] { linear(ones({2, 5}), weight); }, "linear: expected x of shape (…, 4), got [2, 5]");
  expect_error([&] { linear(x, weight, {}, static_cast<Activation>(9)); },
               "linear: expected one of the enumerators of Activation, got 9");
  expect_error([&] { linear(x, weight, ones({4})); }, "linear: expected bias of shape [3], got [4]");
  expect_error([&] { linear(x, ones({3, 4}, float64)); }, "one floating dtype, got float32 and float64");
  expect_error([&] { linear(x, weight, ones({3}, float64)); }, "linear: expected bias of float32 on cpu, got float64");
}

// Gradients accumulate over batches. On a GPU, the product itself adds to the existing gradient.
TEST(Linear, AddsToTheGradientOfEarlierPasses) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      SCOPED_TRACE(fmt::format("{} on {}", dtype, device));
      const auto whole = [&](const Shape& shape) { return randint(-2, 3, shape, int64, device).to(dtype); };
      const Tensor weight = whole({24, 16}).requires_grad_(), bias = whole({24}).requires_grad_();
      const Tensor x[] = {whole({8, 16}), whole({8, 16})}, dy[] = {whole({8, 24}), whole({8, 24})};
      const Tensor d[] = {matmul(transpose(dy[0], 0, 1), x[0]), matmul(transpose(dy[1], 0, 1), x[1])};
      const Tensor both = d[0] + d[1];  // whole numbers: exact in any order
      const auto backward = [&](int i) { linear(x[i], weight, bias).backward(dy[i]); };

      backward(0);
      const Tensor seen = weight.grad();
      backward(1);
      EXPECT_TRUE(weight.grad().is_same(seen));
      expect_close(weight.grad(), to_vector<double>(both), 0, 0);

      // autograd::grad() does not change weight.grad().
      const Tensor y = linear(x[0], weight, bias);
      expect_close(autograd::grad({y}, {weight}, {dy[0]})[0], to_vector<double>(d[0]), 0, 0);
      expect_close(weight.grad(), to_vector<double>(both), 0, 0);

      // The weight is used twice in one pass, after an earlier pass.
      weight.set_grad({});
      backward(0);
      (sum(linear(x[0], weight, bias) * dy[0]) + sum(linear(x[1], weight, bias) * dy[1])).backward();
      expect_close(weight.grad(), to_vector<double>(both + d[0]), 0, 0);

      // A hook gets the contribution of this pass only.
      weight.set_grad({});
      backward(0);
      Tensor hooked;
      weight.register_hook([&](const Tensor& gradient) {
        hooked = gradient.detach() * 1;
        return Tensor{};
      });
      backward(1);
      expect_close(hooked, to_vector<double>(d[1]), 0, 0);
      expect_close(weight.grad(), to_vector<double>(both), 0, 0);
    }
  }
}

}  // namespace linear_test
