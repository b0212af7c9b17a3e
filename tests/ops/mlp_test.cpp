#include <gtest/gtest.h>

#include "tests/launches.h"
#include "tests/ops/matrix_layouts.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/matmul/mlp.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace mlp_test {

constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::leaky_relu, Activation::gelu,
                                       Activation::gelu_tanh};

Tensor by_two_layers(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
                     Activation f) {
  return linear(linear(x, w1, b1, f), w2, b2);
}

// Random x, weight1, bias1, weight2 and bias2, where `hidden` is 4 times `in`.
Tensors random_layer(std::int64_t rows, std::int64_t width, DType dtype, Device device) {
  const auto random = [&](const Shape& shape, double scale) {
    return (randn(shape, float64, device) * scale).to(dtype);
  };
  const double scale = 1 / std::sqrt(static_cast<double>(width));
  return {random({2, rows, width}, 1), random({4 * width, width}, scale), random({4 * width}, 0.5),
          random({width, 4 * width}, scale / 2), random({width}, 0.5)};
}

using Function = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, Activation);

// Computes y and the gradients of all inputs that are defined.
Tensors run(Function function, const Tensors& inputs, Activation f, const Tensor& dy) {
  Tensors leaves;
  for (const Tensor& input : inputs) {
    leaves.push_back(input.defined() ? input.detach().requires_grad_() : input);
  }
  const Tensor y = function(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], f);
  y.backward(dy);
  Tensors results{y.detach()};
  for (const Tensor& leaf : leaves) {
    if (leaf.defined()) {
      results.push_back(leaf.grad());
    }
  }
  return results;
}

// |a − b| / |b|
double distance(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = to_vector<double>(a), y = to_vector<double>(b);
  double apart = 0, size = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    apart += (x[i] - y[i]) * (x[i] - y[i]);
    size += y[i] * y[i];
  }
  return std::sqrt(apart / size);
}

TEST(Mlp, IsTwoLinearLayers) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const Activation f : kActivations) {
        for (const std::int64_t width : {24, 32, 9}) {
          Tensors inputs = random_layer(33, width, dtype, device);
          const Tensor dy = randn(inputs[0].shape(), dtype, device);
          for (const bool biases : {true, false}) {
            if (!biases) {
              inputs[2] = inputs[4] = Tensor{};
            }
            SCOPED_TRACE(fmt::format("{} on {}, activation {}, width {}, biases {}", dtype, device, static_cast<int>(f),
                                     width, biases));
            const Tensors got = run(mlp, inputs, f, dy), pair = run(by_two_layers, inputs, f, dy);
            EXPECT_TRUE(same_bits(got[0], pair[0]));
            Tensors wide_inputs;
            for (const Tensor& input : inputs) {
              wide_inputs.push_back(input.defined() ? input.to(float64) : input);
            }
            const Tensors exact = run(by_two_layers, wide_inputs, f, dy.to(float64));
            ASSERT_EQ(got.size(), exact.size());
            for (std::size_t i = 0; i < got.size(); ++i) {
              // The error must be about that of two linear() calls, which round at other places. But cuBLAS sums the
              // gradient of bias1 from rounded terms, in parts that it rounds again: four roundings instead of two,
              // which makes the error √2 times as large. Between two errors over 96 values each, a quarter more is
              // chance.
              const bool by_cublas =
                  i == 3 && biases && device.is_cuda() && size_of(dtype) == 2 && f == Activation::gelu_tanh;
              EXPECT_LE(distance(got[i], exact[i]), (by_cublas ? 1.77 : 1.1) * distance(pair[i], exact[i]) + 1e-14)
                  << "result " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Mlp, Gradients) {
  for (const Device device : test_devices()) {
    for (const Activation f : kActivations) {
      const Tensors inputs{randn({2, 3, 4}, float64, device), randn({5, 4}, float64, device),
                           randn({5}, float64, device), randn({2, 5}, float64, device), randn({2}, float64, device)};
      const auto with_biases = [&](const Tensors& in) { return mlp(in[0], in[1], in[2], in[3], in[4], f); };
      const auto without = [&](const Tensor& x, const Tensor& w1, const Tensor& w2) {
        return mlp(x, w1, {}, w2, {}, f);
      };
      EXPECT_TRUE(autograd::gradcheck(with_biases, inputs));
      EXPECT_TRUE(autograd::gradcheck(without, {inputs[0], inputs[1], inputs[3]}));
      EXPECT_TRUE(autograd::gradgradcheck(with_biases, inputs));
      EXPECT_TRUE(autograd::gradgradcheck(without, {inputs[0], inputs[1], inputs[3]}));
      // With a single input that requires a gradient, since tensors that only other gradients need are not saved.
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto of_one = [&](const Tensor& a) {
          Tensors all = inputs;
          all[i] = a;
          return mlp(all[0], all[1], all[2], all[3], all[4], f);
        };
        EXPECT_TRUE(autograd::gradgradcheck(of_one, {inputs[i]}));
      }
    }
  }
}

TEST(Mlp, OnlyTheGradientsAskedFor) {
  for (const Device device : test_devices()) {
    for (const Activation f : kActivations) {
      const Tensors inputs = random_layer(5, 8, float32, device);
      const Tensor dy = randn(inputs[0].shape(), float32, device);
      const Tensors all = run(mlp, inputs, f, dy);
      // Since |f(z)| ≤ |z| and |f'| ≤ 1.13, the sums of absolute values without f are an upper bound, nearly.
      Tensors magnitudes;
      for (const Tensor& input : inputs) {
        magnitudes.push_back(abs(input).to(float64));
      }
      const Tensors terms = run(mlp, magnitudes, Activation::none, abs(dy).to(float64));
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        Tensors some = inputs;
        some[i] = inputs[i].detach().requires_grad_();
        mlp(some[0], some[1], some[2], some[3], some[4], f).backward(dy);
        if (device.is_cpu()) {
          EXPECT_TRUE(same_bits(some[i].grad(), all[i + 1])) << i;
          continue;
        }
        // cuBLAS uses another kernel if z or a bias gradient is not required. Both have rounding errors of about √n ·
        // ε/2 times the sum of the terms' absolute values, where n = 8 + 32 + 8 is the largest number of terms in a
        // chain.
        expect_rows_close(some[i].grad(), to_vector<double>(all[i + 1]), to_vector<double>(terms[i + 1]), 1,
                          7 * epsilon_of(float32), fmt::format("input {}", i));
      }
    }
  }
}

TEST(Mlp, RunsAreIdentical) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      const Tensors inputs = random_layer(300, 72, dtype, device);
      const Tensor dy = randn(inputs[0].shape(), dtype, device);
      const Tensors one = run(mlp, inputs, Activation::gelu_tanh, dy);
      for (int round = 0; round < 3; ++round) {
        const Tensors other = run(mlp, inputs, Activation::gelu_tanh, dy);
        for (std::size_t i = 0; i < one.size(); ++i) {
          EXPECT_TRUE(same_bits(one[i], other[i])) << name_of(dtype) << " " << i;
        }
      }
    }
  }
}

// Sizes that are not multiples of a tile, with fewer and more slices of K than there are stages.
TEST(Mlp, EpilogueKernelMatchesReference) {
  if (!gpu_has_wgmma()) {
    GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
  const Device device = Device::cuda();
  for (const DType dtype : {float16, bfloat16}) {
    for (const std::int64_t width : {72, 384}) {
      for (const bool biases : {true, false}) {
        SCOPED_TRACE(fmt::format("{}, width {}, biases {}", dtype, width, biases));
        const double scale = 1 / std::sqrt(static_cast<double>(width));
        const auto random = [&](const Shape& shape, double size) {
          return (randn(shape, float64, device) * size).to(dtype);
        };
        Tensors inputs{random({1413, width}, 1), random({1528, width}, scale), random({1528}, 0.5),
                       random({width, 1528}, scale / 2), random({width}, 0.5)};
        if (!biases) {
          inputs[2] = inputs[4] = Tensor{};
        }
        const Tensor dy = randn(inputs[0].shape(), dtype, device);
        Tensors got;
        {
          cuda::LaunchRecord record;
          got = run(mlp, inputs, Activation::gelu_tanh, dy);
          expect_launched(record, device, {"matmul_epilogue_kernel"});
          EXPECT_EQ(record.has("add_parts_kernel"), biases);
        }
        const Tensors again = run(mlp, inputs, Activation::gelu_tanh, dy);
        Tensors wide;
        for (const Tensor& input : inputs) {
          wide.push_back(input.defined() ? input.to(float64) : input);
        }
        const Tensors exact = run(by_two_layers, wide, Activation::gelu_tanh, dy.to(float64));
        ASSERT_EQ(got.size(), exact.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(same_bits(got[i], again[i])) << "result " << i;
          // Each result, h and dz are rounded once. Sums of many rounded terms have less than one such error.
          EXPECT_LE(distance(got[i], exact[i]), 1.5 * epsilon_of(dtype) / 2) << "result " << i;
        }
      }
    }
  }
}

// The kernel with an epilogue stores f′(z). Second derivatives, which need z, compute it again.
TEST(Mlp, SecondDerivativesOfEpilogueKernel) {
  if (!gpu_has_wgmma()) {
    GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
  const auto run_twice = [](Function function, const Tensors& inputs, const Tensor& dy, const Tensor& u) {
    Tensors leaves;
    for (const Tensor& input : inputs) {
      leaves.push_back(input.defined() ? input.detach().requires_grad_() : input);
    }
    const Tensor y = function(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], Activation::gelu_tanh);
    const Tensor dx = autograd::grad({y}, {leaves[0]}, {dy}, {.create_graph = true})[0];
    dx.backward(u);
    Tensors results{dx.detach()};
    for (const Tensor& leaf : leaves) {
      if (leaf.defined() && leaf.grad().defined()) {
        results.push_back(leaf.grad());
      }
    }
    return results;
  };
  const Device device = Device::cuda();
  constexpr std::int64_t kWidth = 72;
  for (const DType dtype : {float16, bfloat16}) {
    for (const bool biases : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, biases {}", dtype, biases));
      const double scale = 1 / std::sqrt(static_cast<double>(kWidth));
      const auto random = [&](const Shape& shape, double size) {
        return (randn(shape, float64, device) * size).to(dtype);
      };
      Tensors inputs{random({1413, kWidth}, 1), random({1528, kWidth}, scale), random({1528}, 0.5),
                     random({kWidth, 1528}, scale / 2), random({kWidth}, 0.5)};
      if (!biases) {
        inputs[2] = inputs[4] = Tensor{};
      }
      const Tensor dy = random(inputs[0].shape(), 1), u = random(inputs[0].shape(), 1);
      cuda::LaunchRecord record;
      const Tensors got = run_twice(mlp, inputs, dy, u);
      expect_launched(record, device, {"matmul_epilogue_kernel"});
      Tensors wide;
      for (const Tensor& input : inputs) {
        wide.push_back(input.defined() ? input.to(float64) : input);
      }
      const Tensors exact = run_twice(by_two_layers, wide, dy.to(float64), u.to(float64));
      ASSERT_EQ(got.size(), exact.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        // Several roundings in a row: of z, of dh, of f″(z) and of their products.
        EXPECT_LE(distance(got[i], exact[i]), 3 * epsilon_of(dtype) / 2) << "result " << i;
      }
    }
  }
}

// The kernel with an epilogue cannot read an unaligned gradient. Then f′(z) is multiplied by a separate pass.
TEST(Mlp, UnalignedGradientAfterEpilogueKernel) {
  if (!gpu_has_wgmma()) {
    GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
  const Device device = Device::cuda();
  const double scale = 1 / std::sqrt(72.0);
  Tensors inputs{randn({1413, 72}, bfloat16, device), (randn({1528, 72}, float32, device) * scale).to(bfloat16),
                 randn({1528}, bfloat16, device), (randn({72, 1528}, float32, device) * scale).to(bfloat16),
                 randn({72}, bfloat16, device)};
  const Tensor dy = randn({1413 * 72 + 1}, bfloat16, device);
  const Tensor unaligned = reshape(slice(dy, 0, 1, 1413 * 72 + 1), {1413, 72});
  const Tensors got = run(mlp, inputs, Activation::gelu_tanh, unaligned);
  const Tensors aligned = run(mlp, inputs, Activation::gelu_tanh, clone(unaligned));
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(distance(got[i], aligned[i]), 1.5 * epsilon_of(bfloat16) / 2) << "result " << i;
  }
}

TEST(Mlp, NonContiguousAndEmpty) {
  for (const Device device : test_devices()) {
    const Tensors inputs = random_layer(6, 8, float32, device);
    const Tensor dy = randn(inputs[0].shape(), float32, device);
    const Tensors expected = run(mlp, inputs, Activation::gelu_tanh, dy);
    Tensors gaps = inputs;
    gaps[1] = transpose(contiguous(transpose(inputs[1], 0, 1)), 0, 1);
    gaps[3] = transpose(contiguous(transpose(inputs[3], 0, 1)), 0, 1);
    const Tensors got = run(mlp, gaps, Activation::gelu_tanh, transpose(contiguous(transpose(dy, 0, 2)), 0, 2));
    for (std::size_t i = 0; i < got.size(); ++i) {
      expect_close(got[i], expected[i], 1e-5, 1e-5);
    }
    Tensors none = inputs;
    none[0] = empty({0, 3, 8}, float32, device);
    const Tensors zero = run(mlp, none, Activation::gelu_tanh, empty({0, 3, 8}, float32, device));
    EXPECT_EQ(zero[0].shape(), (Shape{0, 3, 8}));
    for (std::size_t i = 2; i < zero.size(); ++i) {
      expect_close(zero[i], std::vector<double>(static_cast<std::size_t>(zero[i].numel()), 0.0), 0, 0);
    }
  }
}

TEST(Mlp, NarrowsUnderAutocast) {
  for (const Device device : test_devices()) {
    const Tensors inputs = random_layer(5, 8, float32, device);
    const autograd::Autocast guard(bfloat16);
    const Tensor y = mlp(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], Activation::gelu_tanh);
    EXPECT_EQ(y.dtype(), bfloat16);
    const Tensor pair = by_two_layers(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], Activation::gelu_tanh);
    EXPECT_TRUE(same_bits(y, pair));
  }
}

TEST(Mlp, Errors) {
  const Tensor x = ones({2, 4}), w1 = ones({8, 4}), b1 = ones({8}), w2 = ones({3, 8}), b2 = ones({3});
  const auto call = [](const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, const Tensor& e) {
    return [=] { mlp(a, b, c, d, e, Activation::relu); };
  };
  expect_error(call({}, w1, b1, w2, b2), "mlp: expected x and two weights");
  expect_error(call(ones({}), w1, b1, w2, b2), "mlp: expected floating x of shape (…, in)");
  expect_error(call(ones({2, 5}), w1, b1, w2, b2), "mlp: expected weight1 of shape (…, 5), got [8, 4]");
  expect_error(call(x, w1, b2, w2, b2), "mlp: expected bias1 of shape [8], got [3]");
  expect_error(call(x, w1, b1, w1, b2), "mlp: expected weight2 of shape (…, 8), got [8, 4]");
  expect_error(call(x, w1, b1, w2, b1), "mlp: expected bias2 of shape [3], got [8]");
  expect_error(call(x, w1.to(float64), b1, w2, b2), "mlp: expected weight1 of float32 on cpu, got float64");
  expect_error(call(x, w1, b1, w2, b2.to(float16)), "mlp: expected bias2 of float32 on cpu, got float16");
}

}  // namespace mlp_test
