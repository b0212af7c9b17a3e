#include <tests/nn/support.h>

#include <mica/core/rng.h>
#include <mica/nn/batch_norm.h>
#include <mica/nn/evaluation.h>
#include <mica/ops/batch_norm/batch_norm.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(BatchNormModule, TrainsAndEvaluates) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    nn::BatchNorm2d norm(3);
    norm.to(device);
    const Tensor x = randn({4, 3, 5, 6}, float32, device) * 3 + 1;
    const Tensor residual = randn({4, 3, 5, 6}, float32, device);
    const Tensor y = norm(x);
    expect_close(y, batch_norm(x), 1e-6, 1e-6);
    EXPECT_EQ(norm.num_batches_tracked.item(), 1);
    expect_close(norm.with_relu(x, residual), relu(batch_norm(x) + residual), 1e-5, 1e-5);
    expect_close(norm.with_relu(x), relu(batch_norm(x)), 1e-6, 1e-6);
    EXPECT_EQ(norm.num_batches_tracked.item(), 3);
    norm.eval();
    const BatchNormOptions options{
        .running_mean = norm.running_mean, .running_var = norm.running_var, .training = false};
    expect_close(norm(x), batch_norm(x, norm.weight, norm.bias, options), 1e-6, 1e-6);
    EXPECT_EQ(norm.num_batches_tracked.item(), 3);
  }
}

TEST(BatchNormModule, HasPyTorchsNames) {
  std::string names;
  const nn::BatchNorm1d norm(2);
  for (const auto& [name, tensor] : norm.state_dict()) {
    names += name + " ";
  }
  EXPECT_EQ(names, "bias num_batches_tracked running_mean running_var weight ");
  const nn::BatchNorm1d plain(2, {.affine = false, .track_running_stats = false});
  EXPECT_TRUE(plain.state_dict().empty());
  const nn::Evaluation evaluation;  // without running statistics, evaluation uses the batch's
  const Tensor x = from_data({-1.f, 1.f, 1.f, 3.f}, {2, 2});
  expect_close(plain(x), std::vector<double>{-1, -1, 1, 1}, 1e-4, 0);
}

TEST(BatchNormModule, Errors) {
  expect_error([] { nn::BatchNorm2d(0); }, "BatchNorm2d: expected num_features >= 1, got 0");
  expect_error([] { nn::BatchNorm2d(1, {.eps = -1}); }, "BatchNorm2d: expected eps >= 0, got -1");
  const nn::BatchNorm2d norm(3);
  expect_error([&] { norm(ones({2, 3})); }, "BatchNorm2d: expected x of shape (N, 3, H, W), got [2, 3]");
  expect_error([&] { norm(ones({2, 4, 1, 1})); }, "BatchNorm2d: expected x of shape (N, 3, H, W), got [2, 4, 1, 1]");
  expect_error([] { nn::BatchNorm1d(3)(ones({3})); }, "BatchNorm1d: expected x of shape (N, 3) or (N, C, L), got [3]");
}

}  // namespace
