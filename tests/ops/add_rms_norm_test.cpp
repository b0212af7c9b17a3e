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
#include <mica/nn/rms_norm.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/norm/add_rms_norm.h>
#include <mica/ops/norm/rms_norm.h>

using namespace mica;
using namespace mica::testing_support;

namespace add_rms_norm_test {

struct Inputs {
  Tensor x, residual, weight, x_bias, dsum, dy;
};

// The results sum and y, and the gradients of the first four inputs.
using Results = Tensors;

Inputs random_inputs(const NormCase& c, Device device) {
  const auto matrix = [&] { return randn({c.rows, c.columns}, c.dtype, device); };
  return {matrix(), matrix(), randn({c.columns}, c.weight_dtype, device), randn({c.columns}, c.dtype, device),
          matrix(), matrix()};
}

template <class F>
Results run_with(const F& f, const Inputs& in) {
  Tensors leaves;
  for (const Tensor& t : {in.x, in.residual, in.weight, in.x_bias}) {
    leaves.push_back(t.detach().requires_grad_());
  }
  manual_seed(123);
  const AddRMSNormResult result = f(leaves[0], leaves[1], leaves[2], leaves[3]);
  Results results{result.sum.detach(), result.y.detach()};
  for (const Tensor& gradient : autograd::grad({result.sum, result.y}, leaves, {in.dsum, in.dy})) {
    results.push_back(gradient);
  }
  return results;
}

Results run(const Inputs& in, double p) {
  return run_with(
      [&](const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& x_bias) {
        return add_rms_norm(x, residual, {x.size(-1)}, weight, {.p = p, .x_bias = x_bias});
      },
      in);
}

// The same by three ops in float64. The norm gets `sum`, which was rounded, as its input.
Results reference(const Inputs& in, double p, const Tensor& sum) {
  const auto exact = [](const Tensor& t) { return t.to(Device::cpu(), float64); };
  return run_with(
      [&](const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& x_bias) {
        const Tensor s = residual + dropout(x + x_bias, p);
        const Tensor rounded = s + (exact(sum) - s.detach());
        return AddRMSNormResult{s, rms_norm(rounded, {x.size(-1)}, weight, 1e-6)};
      },
      {exact(in.x), exact(in.residual), exact(in.weight), exact(in.x_bias), exact(in.dsum), exact(in.dy)});
}

// The norm of the difference, relative to that of `expected`.
double relative_error(const Tensor& got, const Tensor& expected) {
  const std::vector<double> a = to_vector<double>(got);
  const std::vector<double> b = to_vector<double>(expected);
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(error / size);
}

void expect_matches(const Inputs& in, double p, const std::string& what) {
  const DType dtype = in.x.dtype();
  const double eps = dtype == float64 ? 1e-13 : dtype == float32 ? 2e-6 : epsilon_of(dtype);
  const Results got = run(in, p);
  const Results expected = reference(in, p, got[0]);
  const char* const names[] = {"sum", "y", "dx", "dresidual", "dweight", "dx_bias"};
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].shape(), expected[i].shape());
    if (in.x.size(-1) == 1 && names[i] == std::string("dweight")) {
      continue;  // a single number, which may have cancelled almost completely
    }
    EXPECT_LE(relative_error(got[i], expected[i]), 2 * eps) << what << ", " << names[i];
  }
}

class AddRMSNormTypes : public testing::TestWithParam<std::pair<DType, DType>> {};
INSTANTIATE_TEST_SUITE_P(All, AddRMSNormTypes, testing::ValuesIn(kNormTypes), name_of_types);

TEST_P(AddRMSNormTypes, MatchThreeOps) {
  const auto [dtype, weight_dtype] = GetParam();
  for (const Device device : test_devices()) {
    std::vector<std::int64_t> lengths = {1, 7, 8, 64, 128, 200, 257, 768, 1024, 4096};
    if (device.is_cuda()) {
      lengths.insert(lengths.end(), {100, 2056, 2560, 4100, 8192, 16'384, 16'392, 20'001});
    }
    const cuda::LaunchRecord record;
    for (const std::int64_t columns : lengths) {
      for (const std::int64_t rows : {1, 19}) {
        for (const double p : {0.0, 0.3}) {
          manual_seed(columns);
          const NormCase c{dtype, weight_dtype, rows, columns};
          expect_matches(random_inputs(c, device), p, fmt::format("{} on {}, p {}", c.name(), device, p));
        }
      }
    }
    if (dtype != float64) {
      expect_launched(record, device,
                      {"norm_forward_registers_kernel<warp>", "norm_forward_registers_kernel<single_wave>"});
    }
  }
}

TEST_P(AddRMSNormTypes, EachForwardKernel) {
  expect_each_sum_kernel(GetParam(), /*centered=*/false, random_inputs, expect_matches);
}

TEST(AddRMSNorm, OptionalInputsAndAnyLayout) {
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      manual_seed(2);
      const Inputs in = random_inputs({dtype, weight_dtype, 6, 768}, device);
      const auto plain = add_rms_norm(in.x, in.residual, {768});
      expect_same_bits(plain.sum, in.residual + in.x);
      EXPECT_LE(relative_error(plain.y, rms_norm(plain.sum.to(float64), {768})), 2 * epsilon_of(dtype));
      const auto not_training = add_rms_norm(in.x, in.residual, {768}, in.weight, {.p = 0.5, .training = false});
      expect_same_bits(not_training.sum, plain.sum);
      const Results expected = run(in, 0.1);
      for (const auto layout : {with_gaps, off_by_one}) {
        const Results moved = run(
            {layout(in.x), layout(in.residual), layout(in.weight), layout(in.x_bias), layout(in.dsum), layout(in.dy)},
            0.1);
        for (std::size_t i = 0; i < moved.size(); ++i) {
          EXPECT_LE(relative_error(moved[i], expected[i].to(float64)), 4 * epsilon_of(dtype)) << i;
        }
      }
    }
    const Tensor x = randn({2, 3, 4, 5}, float32, device);
    const auto two_axes = add_rms_norm(x, x, {4, 5});
    expect_close(two_axes.y, to_vector<double>(rms_norm(x + x, {4, 5})), 1e-6, 1e-6);
  }
}

TEST(AddRMSNorm, Gradcheck) {
  for (const Device device : test_devices()) {
    for (const double p : {0.0, 0.4}) {
      manual_seed(4);
      const Tensors in{randn({4, 6}, float64, device), randn({4, 6}, float64, device), randn({6}, float64, device),
                       randn({6}, float64, device)};
      const auto all = [&](const Tensor& x, const Tensor& residual, const Tensor& weight,
                           const Tensor& x_bias) -> Tensors {
        manual_seed(5);
        const auto [sum, y] = add_rms_norm(x, residual, {6}, weight, {.p = p, .eps = 0.1, .x_bias = x_bias});
        return {sum, y};
      };
      EXPECT_TRUE(autograd::gradcheck(all, in));
      EXPECT_TRUE(autograd::gradgradcheck(all, in));
      const auto plain = [&](const Tensor& x, const Tensor& residual) {
        manual_seed(5);
        return add_rms_norm(x, residual, {6}, {}, {.p = p}).y;
      };
      EXPECT_TRUE(autograd::gradcheck(plain, {in[0], in[1]}));
      EXPECT_TRUE(autograd::gradgradcheck(plain, {in[0], in[1]}));
    }
  }
}

TEST(AddRMSNorm, DropsWhatDropoutDrops) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({37, 128}, float16, device);
    manual_seed(6);
    const Tensor expected = dropout(x, 0.5);
    manual_seed(6);
    expect_same_bits(add_rms_norm(x, zeros({37, 128}, float16, device), {128}, {}, {.p = 0.5}).sum, expected);
  }
}

TEST(AddRMSNorm, ExtremeRowsMatchRMSNorm) {
  for (const Device device : test_devices()) {
    for (const std::int64_t columns : {256, 4096}) {
      const Tensor zero = zeros({3, columns}, float32, device);
      const Tensor large = full({3, columns}, 1e30, float32, device);
      expect_same_bits(add_rms_norm(large, zero, {columns}).y, rms_norm(large, {columns}));  // 0
      const Tensor nan = full({3, columns}, NAN, float32, device);
      expect_close(add_rms_norm(zero, nan, {columns}).y, std::vector<double>(3 * columns, NAN), 0, 0);
    }
  }
}

TEST(AddRMSNorm, SameBitsInEveryRun) {
  for (const Device device : test_devices()) {
    for (const auto& [dtype, weight_dtype] : kNormTypes) {
      manual_seed(8);
      const Inputs in = random_inputs({dtype, weight_dtype, 97, 768}, device);
      const Results once = run(in, 0.2);
      const Results again = run(in, 0.2);
      for (std::size_t i = 0; i < once.size(); ++i) {
        expect_same_bits(again[i], once[i]);
      }
    }
  }
}

TEST(AddRMSNorm, NoElements) {
  for (const Device device : test_devices()) {
    const Results got = run(random_inputs({float32, float32, 0, 6}, device), 0.5);
    EXPECT_EQ(got[1].shape(), (Shape{0, 6}));
    EXPECT_EQ(got[2].shape(), (Shape{0, 6}));
    expect_close(got[4], std::vector<double>(6, 0), 0, 0);
    expect_close(got[5], std::vector<double>(6, 0), 0, 0);
  }
}

TEST(AddRMSNorm, Module) {
  manual_seed(9);
  const Tensor x = randn({3, 10});
  const Tensor residual = randn({3, 10});
  const Tensor x_bias = randn({10});
  const nn::RMSNorm norm(10);
  const auto [sum, y] = norm(x, residual);
  expect_same_bits(sum, residual + x);
  expect_same_bits(y, norm(residual + x));
  nn::Dropout dropout(0.5);
  manual_seed(10);
  const auto dropped = norm(x, residual, dropout, x_bias);
  manual_seed(10);
  expect_same_bits(dropped.sum, add_rms_norm(x, residual, {10}, {}, {.p = 0.5, .x_bias = x_bias}).sum);
  dropout.eval();
  expect_same_bits(norm(x, residual, dropout).sum, sum);
}

TEST(AddRMSNorm, Errors) {
  const Tensor x = ones({2, 4});
  expect_error(
      [&] {
        add_rms_norm(x, ones({2, 3}), {4});
      },
      "add_rms_norm: expected residual like x, float32 [2, 4] on cpu, got float32 [2, 3] on cpu");
  expect_error([&] { add_rms_norm(x, ones({2, 4}, float64), {4}); }, "add_rms_norm: expected residual like x");
  expect_error([&] { add_rms_norm(x, x, {3}); }, "add_rms_norm: expected x of a shape that ends in [3]");
  expect_error([&] { add_rms_norm(x, x, {}); }, "add_rms_norm: expected normalized_shape of at least one axis");
  expect_error([&] { add_rms_norm(x, x, {4}, ones({3})); }, "add_rms_norm: expected weight of shape [4], got [3]");
  expect_error([&] { add_rms_norm(x, x, {4}, ones({4}, int64)); }, "add_rms_norm: expected weight of float32");
  expect_error([&] { add_rms_norm(x, x, {4}, {}, {.p = 1}); }, "add_rms_norm: expected p in [0, 1), got 1");
  expect_error([&] { add_rms_norm(x, x, {4}, {}, {.eps = -1}); }, "add_rms_norm: expected eps of at least 0");
  expect_error([&] { add_rms_norm(x, x, {4}, {}, {.x_bias = ones({3})}); },
               "add_rms_norm: expected x_bias of shape [4], got [3]");
  expect_error([&] { add_rms_norm(x.to(float16), x.to(float16), {4}, {}, {.x_bias = ones({4})}); },
               "add_rms_norm: expected x_bias of x's float16, got float32");
  expect_error([&] { add_rms_norm(Tensor{}, x, {4}); }, "add_rms_norm: expected x and residual, got an undefined");
  expect_error([&] { add_rms_norm(x.to(int32), x.to(int32), {4}); }, "add_rms_norm: expected x of a floating dtype");
}

}  // namespace add_rms_norm_test
