#include <gtest/gtest.h>

#include <cstring>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// y, dx, dweight and dbias by their definitions, for x (rows, in).
struct Reference {
  std::vector<double> y, dx, dweight, dbias;
};

Reference reference(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& dy) {
  const std::int64_t out = weight.size(0), in = weight.size(1), rows = dy.numel() / out;
  const std::vector<double> xs = to_vector<double>(x), ws = to_vector<double>(weight), gs = to_vector<double>(dy);
  const std::vector<double> bs = bias.defined() ? to_vector<double>(bias) : std::vector<double>(out);
  Reference r{std::vector<double>(rows * out), std::vector<double>(rows * in), std::vector<double>(out * in),
              std::vector<double>(out)};
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < out; ++j) {
      const double g = gs[i * out + j];
      r.y[i * out + j] = bs[j];
      r.dbias[j] += g;
      for (std::int64_t k = 0; k < in; ++k) {
        r.y[i * out + j] += xs[i * in + k] * ws[j * in + k];
        r.dx[i * in + k] += g * ws[j * in + k];
        r.dweight[j * in + k] += g * xs[i * in + k];
      }
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
      EXPECT_TRUE(autograd::gradcheck(linear, {x, weight, bias}));
      EXPECT_TRUE(autograd::gradcheck([](const Tensor& a, const Tensor& w) { return linear(a, w); }, {x, weight}));
    }
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
    // Nothing to sum: the bias is left.
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
    EXPECT_EQ(std::memcmp(one[i].raw_data(), five[i].raw_data(), one[i].bytes()), 0) << i;
  }
  set_num_threads(before);
}

TEST(Linear, Errors) {
  const Tensor x = ones({2, 4}), weight = ones({3, 4});
  expect_error([&] { linear(x, ones({4})); }, "linear: expected weight of shape (out, in), got [4]");
  expect_error([&] { linear(ones({2, 5}), weight); }, "linear: expected x of shape (…, 4), got [2, 5]");
  expect_error([&] { linear(x, weight, ones({4})); }, "linear: expected bias of shape [3], got [4]");
  expect_error([&] { linear(x, ones({3, 4}, float64)); }, "one floating dtype, got float32 and float64");
  expect_error([&] { linear(x, weight, ones({3}, float64)); }, "linear: expected bias of float32 on cpu, got float64");
}

}  // namespace
