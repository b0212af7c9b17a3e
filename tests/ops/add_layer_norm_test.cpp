#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "norm_kernel_cases.h"
#include "tests/launches.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/rng.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/norm/add_layer_norm.h>
#include <mica/ops/norm/layer_norm.h>

using namespace mica;
using namespace mica::testing_support;

namespace add_layer_norm_test {

struct Inputs {
  Tensor x, residual, weight, bias, dsum, dy, x_bias{};
};

struct Results {
  Tensor sum{}, y{}, dx{}, dresidual{}, dweight{}, dbias{}, dx_bias{};
};

Inputs random_inputs(const NormCase& c, Device device) {
  const auto matrix = [&] { return randn({c.rows, c.columns}, c.dtype, device); };
  const auto row = [&] { return randn({c.columns}, c.weight_dtype, device); };
  return {matrix(), matrix(), row(), row(), matrix(), matrix()};
}

template <class F>
Results run_with(const F& f, const Inputs& in) {
  const auto leaf = [](const Tensor& t) { return t.defined() ? t.detach().requires_grad_() : t; };
  const Tensor x = leaf(in.x), residual = leaf(in.residual), weight = leaf(in.weight), bias = leaf(in.bias);
  const Tensor x_bias = leaf(in.x_bias);
  manual_seed(123);
  const AddLayerNormResult result = f(x, residual, weight, bias, x_bias);
  Results results{.sum = result.sum.detach(), .y = result.y.detach()};
  Tensors leaves;
  std::vector<Tensor*> gradients;
  const auto want = [&](const Tensor& leaf, Tensor& gradient) {
    if (leaf.defined()) {
      leaves.push_back(leaf);
      gradients.push_back(&gradient);
    }
  };
  want(x, results.dx);
  want(residual, results.dresidual);
  want(weight, results.dweight);
  want(bias, results.dbias);
  want(x_bias, results.dx_bias);
  const Tensors found = autograd::grad({result.sum, result.y}, leaves, {in.dsum, in.dy});
  for (std::size_t i = 0; i < found.size(); ++i) {
    *gradients[i] = found[i];
  }
  return results;
}

Results run(const Inputs& in, AddLayerNormOptions options) {
  return run_with(
      [&](const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, const Tensor& x_bias) {
        options.x_bias = x_bias;
        return add_layer_norm(x, residual, {x.size(-1)}, weight, bias, options);
      },
      in);
}

// The same by three ops in float64. The norm gets `sum`, which was rounded, as its input.
Results reference(const Inputs& in, AddLayerNormOptions options, const Tensor& sum) {
  const auto exact = [](const Tensor& t) { return t.defined() ? t.to(Device::cpu(), float64) : t; };
  return run_with(
      [&](const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias, const Tensor& x_bias) {
        const Tensor s = residual + dropout(x_bias.defined() ? x + x_bias : x, options.p, options.training);
        const Tensor rounded = s + (exact(sum) - s.detach());
        return AddLayerNormResult{s, layer_norm(rounded, {x.size(-1)}, weight, bias, options.eps)};
      },
      {exact(in.x), exact(in.residual), exact(in.weight), exact(in.bias), exact(in.dsum), exact(in.dy),
       exact(in.x_bias)});
}

void expect_matches(const Inputs& in, AddLayerNormOptions options, const std::string& what) {
  const Results got = run(in, options);
  const Results expected = reference(in, options, got.sum);
  const DType dtype = in.x.dtype();
  const double eps = epsilon_of(dtype);
  const double atol = dtype == float64 ? 1e-12 : 1e-5;
  // The result of dropout may be rounded before it is added. If there is an x_bias, other ops' kernels may be used,
  // which also round x + x_bias.
  const double by_steps = in.x_bias.defined() ? 2 : 1;
  expect_close(got.sum, to_vector<double>(expected.sum), 2 * eps, by_steps * 4 * eps, what + ", sum");
  expect_close(got.y, to_vector<double>(expected.y), 2 * eps, atol, what + ", y");
  // dresidual = dsum + dnorm and dx = factor · dresidual. In 16 bits, dnorm is rounded before it is added (and the two
  // may cancel), and the sum is rounded before it is multiplied: half an epsilon of each.
  const double half = size_of(dtype) == 2 ? eps / 2 : 0;
  const double rounded = dtype == float64 ? 1e-12 : 1e-5;  // the relative error of one kernel's arithmetic
  const std::int64_t columns = in.x.size(-1);
  const std::vector<double> dsum =
      in.dsum.defined() ? to_vector<double>(in.dsum) : std::vector<double>(static_cast<std::size_t>(in.x.numel()), 0.0);
  const std::vector<double> dsum_sizes = row_sizes(dsum, columns);
  const auto expect_rows = [&](const Tensor& t, const Tensor& wanted, double factor, const std::string& name) {
    const std::vector<double> values = to_vector<double>(wanted);
    const std::vector<double> sizes = row_sizes(values, columns);
    std::vector<double> limits(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double dnorm = std::abs(values[i]) + factor * std::abs(dsum[i]);  // an upper bound of factor · |dnorm|
      limits[i] =
          half * (dnorm + std::abs(values[i])) + rounded * (sizes[i / columns] + factor * dsum_sizes[i / columns]);
    }
    expect_rows_close(t, values, limits, 1, 1, what + name);
  };
  expect_rows(got.dresidual, expected.dresidual, 1, ", dresidual");
  expect_rows(got.dx, expected.dx, 1 / (1 - options.p), ", dx");
  const double rows = std::sqrt(static_cast<double>(in.x.size(0)));
  const auto expect_row = [&](const Tensor& t, const Tensor& wanted, const char* name) {
    ASSERT_EQ(t.defined(), wanted.defined());
    if (t.defined()) {
      expect_close(t, to_vector<double>(wanted), 2 * epsilon_of(t.dtype()), 10 * atol * rows, what + name);
    }
  };
  expect_row(got.dweight, expected.dweight, ", dweight");
  expect_row(got.dbias, expected.dbias, ", dbias");
  if (in.x_bias.defined()) {
    // Sums over dx, which may have been rounded, so that the errors above add up.
    const std::vector<double> dx = to_vector<double>(expected.dx);
    std::vector<double> limits(static_cast<std::size_t>(columns));
    for (std::size_t i = 0; i < dx.size(); ++i) {
      limits[i % limits.size()] += (half + rounded) * (3 * std::abs(dx[i]) + 2 * std::abs(dsum[i]) + 1);
    }
    expect_rows_close(got.dx_bias, to_vector<double>(expected.dx_bias), limits, 1, 1, what + ", dx_bias");
  }
}

// One test for each pair of dtypes, so that they can run in parallel.
class AddLayerNormTypes : public testing::TestWithParam<std::pair<DType, DType>> {};
TEST(AddLayerNorm, RowsDoNotDependOnHowManyThereAre) {
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      for (const std::int64_t columns : {64, 128, 200, 512, 768, 4096}) {
        const std::int64_t rows = device.is_cpu() ? 70 : columns <= 512 ? 1151 : 2500;
        const Inputs in = random_inputs({dtype, weight_dtype, rows, columns}, device);
        const auto some = [](const Tensor& t) { return rows_of(t, 5, 3); };
        const Results all = run(in, {});
        const Results few = run({some(in.x), some(in.residual), in.weight, in.bias, some(in.dsum), some(in.dy)}, {});
        const std::string what = fmt::format("{} columns, {}", columns, dtype);
        expect_same_bits(few.y, some(all.y), "y, " + what);
        expect_same_bits(few.dx, some(all.dx), "dx, " + what);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AddLayerNormTypes, testing::ValuesIn(kNormTypes), name_of_types);

TEST_P(AddLayerNormTypes, MatchThreeOps) {
  manual_seed(1);
  const auto [dtype, weight_dtype] = GetParam();
  for (const Device device : test_devices()) {
    std::vector<std::int64_t> lengths = {1, 7, 8, 64, 100, 128, 192, 200, 257, 768, 1000, 1024, 4096, 4100};
    if (device.is_cuda()) {
      lengths.insert(lengths.end(), {2056, 8192, 12'288, 16'384, 16'392, 20'001});
    }
    const cuda::LaunchRecord record;
    OneIn three(3);
    for (const std::int64_t columns : lengths) {
      if (three.skips()) {
        continue;
      }
      // With many rows, each block of a persistent kernel has several.
      const bool many = device.is_cuda() && (columns <= 1024 || columns == 4096);
      for (const std::int64_t rows : {1, 19, many ? 1151 : 20}) {
        for (const double p : {0.0, 0.3}) {
          const NormCase c{dtype, weight_dtype, rows, columns};
          manual_seed(columns);
          Inputs in = random_inputs(c, device);
          const std::string what = fmt::format("{} on {}, p {}", c.name(), device, p);
          expect_matches(in, {.p = p}, what);
          if (rows != 19) {
            in.x_bias = randn({columns}, dtype, device);
            expect_matches(in, {.p = p}, what + ", a bias of x");
          }
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
    if (dtype == float64) {
      continue;  // falls back to three ops
    }
    expect_launched(record, device,
                    {"norm_forward_registers_kernel<block>", "dropout_kernel", "norm_forward_registers_kernel<warp>",
                     "norm_forward_registers_kernel<single_wave>"});
    if (gpu_has_clusters()) {
      expect_launched(record, device, {"norm_backward_stream_kernel"});
    }
  }
}

TEST_P(AddLayerNormTypes, EachForwardKernel) {
  expect_each_sum_kernel(
      GetParam(), /*centered=*/true, random_inputs,
      [](const Inputs& in, double p, const std::string& what) { expect_matches(in, {.p = p}, what); });
}

TEST(AddLayerNorm, OptionalParametersAndAnyLayout) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      const Inputs in = random_inputs({dtype, weight_dtype, 6, 768}, device);
      Inputs some = in;
      some.weight = {};
      expect_matches(some, {}, "no weight");
      some.bias = {};
      expect_matches(some, {.p = 0.5}, "no parameters");
      some.weight = in.weight;
      expect_matches(some, {.p = 0.5, .training = false}, "no bias");
      for (const auto layout : {with_gaps, off_by_one}) {
        const Inputs moved{layout(in.x),
                           layout(in.residual),
                           layout(in.weight),
                           layout(in.bias),
                           layout(in.dsum),
                           layout(in.dy),
                           layout(randn({768}, dtype, device))};
        expect_matches(moved, {.p = 0.1}, "moved");
      }
    }
  }
}

TEST(AddLayerNorm, OneResultMayBeUnused) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Inputs in = random_inputs({float64, float64, 5, 8}, device);
    const Tensor x = in.x.detach().requires_grad_();
    const auto [sum, y] = add_layer_norm(x, in.residual, {8}, in.weight, in.bias);
    expect_close(autograd::grad({sum}, {x}, {in.dsum}, {.retain_graph = true})[0], in.dsum, 0, 0);
    const Tensor s = sum.detach().requires_grad_();
    const Tensor expected = autograd::grad({layer_norm(s, {8}, in.weight, in.bias)}, {s}, {in.dy})[0];
    expect_close(autograd::grad({y}, {x}, {in.dy})[0], expected, 1e-12, 1e-12);
  }
}

// Only x_bias requires a gradient, both where a single kernel computes everything and where several do.
TEST(AddLayerNorm, OnlyTheGradientOfTheBiasOfX) {
  for (const Device device : test_devices()) {
    for (const double p : {0.0, 0.4}) {
      for (const std::int64_t columns : {24, 768, 2048}) {
        manual_seed(9);
        Inputs in = random_inputs({bfloat16, bfloat16, 300, columns}, device);
        in.x_bias = randn({columns}, bfloat16, device);
        const Tensor x_bias = in.x_bias.detach().requires_grad_();
        manual_seed(123);
        const auto [sum, y] =
            add_layer_norm(in.x, in.residual, {columns}, in.weight, in.bias, {.p = p, .x_bias = x_bias});
        const Tensor alone = autograd::grad({sum, y}, {x_bias}, {in.dsum, in.dy})[0];
        expect_same_bits(alone, run(in, {.p = p}).dx_bias);
      }
    }
  }
}

TEST(AddLayerNorm, Gradcheck) {
  for (const Device device : test_devices()) {
    for (const double p : {0.0, 0.4}) {
      manual_seed(4);
      const Tensors in{randn({4, 6}, float64, device), randn({4, 6}, float64, device), randn({6}, float64, device),
                       randn({6}, float64, device)};
      const auto f = [&](const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias) -> Tensors {
        manual_seed(5);
        const auto [sum, y] = add_layer_norm(x, residual, {6}, weight, bias, {.p = p, .eps = 0.1});
        return {sum, y};
      };
      EXPECT_TRUE(autograd::gradcheck(f, in));
      EXPECT_TRUE(autograd::gradgradcheck(f, in));
      const auto with_bias = [&](const Tensor& x, const Tensor& residual, const Tensor& weight,
                                 const Tensor& x_bias) -> Tensors {
        manual_seed(5);
        const auto [sum, y] = add_layer_norm(x, residual, {6}, weight, {}, {.p = p, .eps = 0.1, .x_bias = x_bias});
        return {sum, y};
      };
      EXPECT_TRUE(autograd::gradcheck(with_bias, in));
      EXPECT_TRUE(autograd::gradgradcheck(with_bias, in));
      const auto plain = [&](const Tensor& x, const Tensor& residual) {
        manual_seed(5);
        return add_layer_norm(x, residual, {6}, {}, {}, {.p = p}).y;
      };
      EXPECT_TRUE(autograd::gradcheck(plain, {in[0], in[1]}));
      EXPECT_TRUE(autograd::gradgradcheck(plain, {in[0], in[1]}));
    }
  }
}

TEST(AddLayerNorm, DropsWhatDropoutDrops) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16}) {
      const Tensor x = ones({37, 128}, dtype, device);
      manual_seed(6);
      const Tensor expected = dropout(x, 0.5);
      manual_seed(6);
      expect_same_bits(add_layer_norm(x, zeros({37, 128}, dtype, device), {128}, {}, {}, {.p = 0.5}).sum, expected);
    }
  }
}

TEST(AddLayerNorm, ExtremeRowsMatchLayerNorm) {
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : {256, 4096}) {
      manual_seed(7);
      const Tensor zero = zeros({3, columns}, float32, device);
      const Tensor large = randn({3, columns}, float32, device) * 1e30;
      const auto expect_as_layer_norm = [&](const Tensor& x) {
        const Tensor y = layer_norm(x.to(Device::cpu(), float64), {columns});
        expect_close(add_layer_norm(x, zero, {columns}).y, to_vector<double>(y), 1e-5, 1e-5);
      };
      expect_as_layer_norm(large);
      expect_as_layer_norm(full({3, columns}, 0.1, float32, device));
      expect_close(add_layer_norm(full({3, columns}, 0.1, float32, device), zero, {columns}).y,
                   std::vector<double>(3 * columns, 0), 0, 0);
      expect_as_layer_norm(randn({3, columns}, float32, device) + 1e4);
    }
  }
}

TEST(AddLayerNorm, SameBitsInEveryRun) {
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      manual_seed(8);
      Inputs in = random_inputs({dtype, weight_dtype, 97, 768}, device);
      in.x_bias = randn({768}, dtype, device);
      const Results once = run(in, {.p = 0.2});
      const Results again = run(in, {.p = 0.2});
      expect_same_bits(again.sum, once.sum);
      expect_same_bits(again.y, once.y);
      expect_same_bits(again.dx, once.dx);
      expect_same_bits(again.dresidual, once.dresidual);
      expect_same_bits(again.dweight, once.dweight);
      expect_same_bits(again.dbias, once.dbias);
      expect_same_bits(again.dx_bias, once.dx_bias);
    }
  }
}

TEST(AddLayerNorm, NoElements) {
  for (const Device device : test_devices()) {
    Inputs in = random_inputs({float32, float32, 0, 6}, device);
    in.x_bias = ones({6}, float32, device);
    for (const double p : {0.0, 0.5}) {
      const Results got = run(in, {.p = p});
      EXPECT_EQ(got.y.shape(), (Shape{0, 6}));
      EXPECT_EQ(got.dx.shape(), (Shape{0, 6}));
      expect_close(got.dweight, std::vector<double>(6, 0), 0, 0);
      expect_close(got.dx_bias, std::vector<double>(6, 0), 0, 0);
      expect_close(got.dbias, std::vector<double>(6, 0), 0, 0);
    }
  }
}

TEST(AddLayerNorm, Errors) {
  const Tensor x = ones({2, 4});
  expect_error(
      [&] {
        add_layer_norm(x, ones({2, 3}), {4});
      },
      "add_layer_norm: expected residual like x, float32 [2, 4] on cpu, got float32 [2, 3] on cpu");
  expect_error([&] { add_layer_norm(x, ones({2, 4}, float64), {4}); }, "add_layer_norm: expected residual like x");
  expect_error([&] { add_layer_norm(x, x, {3}); }, "add_layer_norm: expected x of a shape that ends in [3]");
  expect_error([&] { add_layer_norm(x, x, {}); }, "add_layer_norm: expected normalized_shape of at least one axis");
  expect_error([&] { add_layer_norm(x, x, {4}, ones({3})); }, "add_layer_norm: expected weight of shape [4], got [3]");
  expect_error([&] { add_layer_norm(x, x, {4}, {}, ones({4}, int64)); }, "add_layer_norm: expected bias of float32");
  expect_error([&] { add_layer_norm(x.to(float16), x.to(float16), {4}, ones({4}), ones({4}, float16)); },
               "add_layer_norm: expected bias of weight's float32, got float16");
  expect_error([&] { add_layer_norm(x, x, {4}, {}, {}, {.p = 1}); }, "add_layer_norm: expected p in [0, 1), got 1");
  expect_error([&] { add_layer_norm(x, x, {4}, {}, {}, {.eps = -1}); }, "add_layer_norm: expected eps of at least 0");
  expect_error([&] { add_layer_norm(x, x, {4}, {}, {}, {.x_bias = ones({3})}); },
               "add_layer_norm: expected x_bias of shape [4], got [3]");
  expect_error([&] { add_layer_norm(x.to(float16), x.to(float16), {4}, {}, {}, {.x_bias = ones({4})}); },
               "add_layer_norm: expected x_bias of x's float16, got float32");
  expect_error([&] { add_layer_norm(x, Tensor{}, {4}); }, "add_layer_norm: expected x and residual, got an undefined");
  expect_error([&] { add_layer_norm(x.to(int32), x.to(int32), {4}); },
               "add_layer_norm: expected x of a floating dtype");
}

}  // namespace add_layer_norm_test
