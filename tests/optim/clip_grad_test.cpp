#include <tests/support.h>

#include <limits>

#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/clip_grad.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

Tensor with_grad(const Tensor& grad) {
  const Tensor x = empty(grad.shape(), grad.dtype(), grad.device()).requires_grad_();
  x.set_grad(grad);
  return x;
}

TEST(ClipGradNorm, ScalesToTheNorm) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      manual_seed(1);
      const Tensors grads{randn({70'001}, dtype, device), randn({3, 1}, dtype, device), randn({0}, dtype, device),
                          as_strided(randn({40}, dtype, device), {5, 7}, {1, 5}, 1)};
      Tensors parameters{empty({2}, dtype, device).requires_grad_()};  // has no gradient
      double squares = 0;
      std::vector<std::vector<double>> before;
      for (const Tensor& grad : grads) {
        parameters.push_back(with_grad(grad));
        before.push_back(to_vector<double>(grad));
        for (const double value : before.back()) {
          squares += value * value;
        }
      }
      const double norm = std::sqrt(squares);
      EXPECT_NEAR(optim::clip_grad_norm_(parameters, 2 * norm).item(), norm, 1e-9 * norm);
      expect_close(grads[1], before[1], 0, 0);

      const std::uint32_t version = grads[0].version();
      EXPECT_NEAR(optim::clip_grad_norm_(parameters, 2).item(), norm, 1e-9 * norm);
      EXPECT_GT(grads[0].version(), version);
      const double rounding = dtype == float64 ? 1e-12 : dtype == float32 ? 1e-6 : dtype == float16 ? 0x1p-10 : 0x1p-7;
      for (std::size_t i = 0; i < grads.size(); ++i) {
        for (double& value : before[i]) {
          value *= 2 / (norm + 1e-6);
        }
        expect_close(grads[i], before[i], rounding, 1e-6);
      }
      EXPECT_FALSE(parameters[0].grad().defined());
    }
  }
}

TEST(ClipGradNorm, MaximumNormOfZero) {
  for (const Device device : test_devices()) {
    const Tensor x = with_grad(full({3}, 2, float64, device));
    optim::clip_grad_norm_({x}, 0);
    expect_close(x.grad(), {0, 0, 0}, 0, 0);
  }
}

TEST(ClipGradNorm, LargeGradientsDoNotOverflow) {
  for (const Device device : test_devices()) {
    const Tensor x = with_grad(full({4}, 1e30, float32, device));
    EXPECT_NEAR(optim::clip_grad_norm_({x}, 1).item(), 2e30, 1e24);
    expect_close(x.grad(), {0.5, 0.5, 0.5, 0.5}, 1e-6, 0);
  }
}

TEST(ClipGradNorm, SameBitsOnAnyNumberOfThreads) {
  const int threads = num_threads();
  manual_seed(2);
  const Tensor x = with_grad(randn({100'003}));
  std::vector<double> norms;
  for (const int n : {1, 2, 3, 8}) {
    set_num_threads(n);
    norms.push_back(optim::clip_grad_norm_({x}, 1e9).item());
  }
  set_num_threads(threads);
  for (const double norm : norms) {
    EXPECT_EQ(norm, norms[0]);
  }
}

TEST(ClipGradNorm, NonFiniteNorms) {
  for (const Device device : test_devices()) {
    const Tensor x = with_grad(full({3}, std::numeric_limits<double>::infinity(), float32, device));
    const Tensor y = with_grad(ones({1}, float32, device));
    expect_error([&] { optim::clip_grad_norm_({x, y}, 1, true); }, "the norm of the gradients is inf");
    EXPECT_EQ(y.grad().item(), 1);
    EXPECT_TRUE(std::isinf(optim::clip_grad_norm_({x, y}, 1).item()));
    EXPECT_TRUE(std::isnan(to_vector<double>(x.grad())[0]));
    EXPECT_TRUE(std::isnan(optim::clip_grad_norm_({x, y}, 1).item()));
    EXPECT_TRUE(std::isnan(y.grad().item()));
  }
  EXPECT_EQ(optim::clip_grad_norm_({}, 1).item(), 0);
  expect_error([] { optim::clip_grad_norm_({}, -1); }, "expected max_norm >= 0, got -1");
}

TEST(ClipGradNorm, RefusedBeforeTheStepOfAScaler) {
  for (const Device device : test_devices()) {
    const Tensor x = zeros({2}, float32, device).requires_grad_();
    optim::SGD sgd({x}, {.lr = 1});
    optim::GradScaler scaler({.init_scale = 4});
    const auto backward = [&] {
      sgd.zero_grad();
      scaler.scale(sum(x * from_data({3.0F, 4.0F}, device))).backward();
    };
    backward();
    optim::clip_grad_norm_({x}, 1);
    expect_error(
        [&] { sgd.step({.scaler = &scaler}); },
        "SGD: the gradient of a parameter of shape [2] was clipped by clip_grad_norm_ while it was still scaled");
    expect_close(x, std::vector<double>{0, 0}, 0, 0);
    sgd.step();  // of gradients that are not scaled
    expect_close(x, std::vector<double>{-0.6, -0.8}, 1e-6, 0);
    // Without a limit, it only measures.
    backward();
    EXPECT_EQ(optim::clip_grad_norm_({x}, INFINITY).item(), 20);
    sgd.step({.scaler = &scaler});
    expect_close(x, std::vector<double>{-3.6, -4.8}, 1e-6, 0);
    // The next gradient is a new one.
    backward();
    optim::clip_grad_norm_({x}, 1);
    backward();
    sgd.step({.max_grad_norm = 2.5, .scaler = &scaler});
    expect_close(x, std::vector<double>{-5.1, -6.8}, 1e-6, 0);
  }
}

TEST(ClipGradNorm, ParametersCountOnce) {
  for (const Device device : test_devices()) {
    const Tensor x = with_grad(from_data<float>({3, 4}, device));
    EXPECT_DOUBLE_EQ(optim::clip_grad_norm_({x, x, x}, 1).item(), 5);
    expect_close(x.grad(), {0.6, 0.8}, 1e-6, 0);
  }
  expect_error([] { optim::clip_grad_norm_({Tensor{}}, 1); }, "expected defined parameters");
}

TEST(ClipGradNorm, SharedGradientsAreScaledOnce) {
  for (const Device device : test_devices()) {
    const Tensor grad = from_data<float>({3, 4}, device);
    const Tensor a = with_grad(grad);
    const Tensor b = with_grad(grad);
    EXPECT_NEAR(optim::clip_grad_norm_({a, b}, 1).item(), std::sqrt(50), 1e-12);
    expect_close(grad, {3 / std::sqrt(50), 4 / std::sqrt(50)}, 1e-6, 0);
  }
}

}  // namespace
