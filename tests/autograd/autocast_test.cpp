#include <tests/support.h>

#include <thread>

#include <mica/autograd/autocast.h>
#include <mica/autograd/checkpoint.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/cross_entropy/linear_cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/norm/add_layer_norm.h>
#include <mica/ops/norm/layer_norm.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::Autocast;

namespace {

TEST(Autocast, Dtypes) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      const Tensor wide = rand({4, 8}, float32, device);
      const Tensor narrow = wide.to(dtype);
      const Tensor row = ones({8}, float32, device);
      const Tensor heads = rand({2, 4, 8}, float32, device);
      const Tensor targets = zeros({4}, int64, device);
      const Autocast guard(dtype);
      EXPECT_EQ(autograd::autocast_dtype(), dtype);
      EXPECT_EQ(matmul(wide, transpose(narrow, 0, 1)).dtype(), dtype);
      EXPECT_EQ(matmul(wide, row).dtype(), dtype);
      EXPECT_EQ(linear(wide, wide, rand({4}, float32, device)).dtype(), dtype);
      EXPECT_EQ(scaled_dot_product_attention(heads, heads.to(dtype), heads).dtype(), dtype);

      EXPECT_EQ(layer_norm(narrow, {8}, row, row).dtype(), float32);
      EXPECT_EQ(layer_norm(narrow, {8}).dtype(), float32);
      EXPECT_EQ(rms_norm(narrow, {8}, row).dtype(), float32);
      const auto [sums, normed] = add_layer_norm(narrow, wide, {8}, row, row);
      EXPECT_EQ(sums.dtype(), float32);
      EXPECT_EQ(normed.dtype(), float32);
      EXPECT_EQ(softmax(narrow, -1).dtype(), float32);
      EXPECT_EQ(log_softmax(narrow, -1).dtype(), float32);
      EXPECT_EQ(logsumexp(narrow, {1}).dtype(), float32);
      EXPECT_EQ(cross_entropy(narrow, targets).dtype(), float32);
      EXPECT_EQ(linear_cross_entropy(wide, wide, targets).dtype(), float32);

      EXPECT_EQ((narrow + wide).dtype(), float32);
      EXPECT_EQ((wide - narrow).dtype(), float32);
      EXPECT_EQ((narrow * wide).dtype(), float32);
      EXPECT_EQ((wide / narrow).dtype(), float32);
      EXPECT_EQ(maximum(wide, narrow).dtype(), float32);
      EXPECT_EQ(minimum(narrow, wide).dtype(), float32);

      EXPECT_EQ((narrow + narrow).dtype(), dtype);
      EXPECT_EQ(gelu(narrow).dtype(), dtype);
      EXPECT_EQ(sum(narrow).dtype(), dtype);
      EXPECT_EQ(exp(wide).dtype(), float32);
      EXPECT_EQ(matmul(wide.to(float64), transpose(wide.to(float64), 0, 1)).dtype(), float64);
    }
  }
}

TEST(Autocast, NestsAndEnds) {
  const Tensor x = ones({2, 2});
  const auto dtype = [&] { return matmul(x, x).dtype(); };
  EXPECT_EQ(dtype(), float32);
  EXPECT_EQ(autograd::autocast_dtype(), std::nullopt);
  {
    const Autocast outer(bfloat16);
    EXPECT_EQ(dtype(), bfloat16);
    {
      const Autocast inner(float16);
      EXPECT_EQ(dtype(), float16);
      const Autocast off(std::nullopt);
      EXPECT_EQ(dtype(), float32);
      EXPECT_EQ(autograd::autocast_dtype(), std::nullopt);
    }
    EXPECT_EQ(dtype(), bfloat16);
    std::thread([&] { EXPECT_EQ(dtype(), float32); }).join();
  }
  EXPECT_EQ(dtype(), float32);
  expect_error([] { Autocast guard(float64); }, "Autocast: expected float16 or bfloat16, got float64");
}

// With operands that are exact in 16 bits, results equal those in float32.
TEST(Autocast, GradientsArriveInFloat32) {
  for (const Device device : test_devices()) {
    manual_seed(1);
    const auto exact = [&](const Shape& shape) { return randn(shape, bfloat16, device).to(float32).requires_grad_(); };
    const Tensor x = exact({5, 8}), weight = exact({3, 8}), bias = exact({3});
    const Tensor seed = randn({5, 3}, bfloat16, device);
    const auto run = [&](bool on) {
      Tensor y;
      {
        const Autocast guard(on ? std::optional(bfloat16) : std::nullopt);
        y = linear(x, weight, bias);
      }
      EXPECT_EQ(y.dtype(), on ? bfloat16 : float32);
      y.backward(seed.to(y.dtype()));
      Tensors grads;
      for (const Tensor& leaf : {x, weight, bias}) {
        EXPECT_EQ(leaf.grad().dtype(), float32);
        grads.push_back(leaf.grad());
        leaf.set_grad({});
      }
      return grads;
    };
    const Tensors plain = run(false), cast = run(true);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      expect_close(cast[i], plain[i], 0x1p-7, 1e-3);
    }
  }
}

TEST(Autocast, ConvertsParametersOnce) {
  for (const Device device : test_devices()) {
    const Tensor weight = full({2, 2}, 1, float32, device).requires_grad_();
    const Tensor x = ones({2, 2}, bfloat16, device);
    const Autocast guard(bfloat16);
    // Uses read the cached copy: a write that is not counted has no effect, a counted one has.
    expect_close(matmul(x, weight), {2, 2, 2, 2}, 0, 0);
    fill_data(weight, 3);
    expect_close(matmul(x, weight), {2, 2, 2, 2}, 0, 0);
    weight.bump_version();
    expect_close(matmul(x, weight), {6, 6, 6, 6}, 0, 0);
    // Views and other dtypes have their own copies.
    const Tensor column = slice(weight, 1, 0, 1);
    expect_close(matmul(x, column), {6, 6}, 0, 0);
    {
      const Autocast inner(float16);
      expect_close(matmul(x.to(float16), weight), {6, 6, 6, 6}, 0, 0);
    }
    // A new guard does not see the old one's copies.
    fill_data(weight, 4);
    {
      const Autocast same_cache(bfloat16);
      expect_close(matmul(x, weight), {6, 6, 6, 6}, 0, 0);
    }
    std::thread([&] {
      const Autocast other(bfloat16);
      expect_close(matmul(x, weight), {8, 8, 8, 8}, 0, 0);
    }).join();
  }
}

TEST(Autocast, FollowsOptimizersAndSetData) {
  for (const Device device : test_devices()) {
    const Tensor weight = ones({2, 2}, float32, device).requires_grad_();
    const Tensor x = ones({2, 2}, float32, device);
    optim::SGD optimizer({weight}, {.lr = 0.25});
    const Autocast guard(bfloat16);
    for (int step = 0; step < 3; ++step) {
      const Tensor y = matmul(x, weight);
      expect_close(y, std::vector<double>(4, 2 - step), 0, 0);
      optimizer.zero_grad();
      sum(y).backward();  // inside the guard
      EXPECT_EQ(weight.grad().dtype(), float32);
      expect_close(weight.grad(), {2, 2, 2, 2}, 0, 0);
      optimizer.step();
    }
    weight.set_data(full({2, 2}, 8, float32, device));
    expect_close(matmul(x, weight), {16, 16, 16, 16}, 0, 0);
  }
}

// Several graphs use the copy; each has its own backward.
TEST(Autocast, SeveralGraphsFromOneCopy) {
  for (const Device device : test_devices()) {
    const Tensor weight = ones({2, 2}, float32, device).requires_grad_();
    const Tensor x = ones({2, 2}, float32, device);
    const Autocast guard(bfloat16);
    {
      const autograd::NoGrad no_grad;
      EXPECT_FALSE(matmul(x, weight).requires_grad());
    }
    inference_mode([&] { return matmul(x, weight); });
    for (int pass = 1; pass <= 3; ++pass) {
      (sum(matmul(x, weight)) + sum(matmul(weight, x))).backward();
      expect_close(weight.grad(), std::vector<double>(4, 4 * pass), 0, 0);
    }
  }
}

TEST(Autocast, SecondDerivatives) {
  const Tensor x = full({1, 1}, 3).requires_grad_();
  Tensor y;
  {
    const Autocast guard(bfloat16);
    y = matmul(matmul(x, x), x);
  }
  const Tensor dx = autograd::grad({y}, {x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(dx.dtype(), float32);
  EXPECT_EQ(dx.item(), 27);
  EXPECT_EQ(autograd::grad({dx}, {x})[0].item(), 18);
}

TEST(Autocast, Checkpoints) {
  manual_seed(2);
  const nn::Linear fc1(8, 16), fc2(16, 8);
  const nn::LayerNorm norm({8});
  const Tensor x = randn({4, 8});
  const auto block = [&](const Tensor& input) { return input + fc2(gelu(fc1(norm(input)))); };
  const auto gradient = [&](bool checkpointed) {
    Tensor loss;
    {
      const Autocast guard(bfloat16);
      loss = sum(checkpointed ? autograd::checkpoint(block, x) : block(x));
    }
    EXPECT_EQ(loss.dtype(), float32);
    loss.backward();
    const Tensor grad = fc1.weight.grad();
    for (const Tensor& leaf : {fc1.weight, fc1.bias, fc2.weight, fc2.bias, norm.weight, norm.bias}) {
      leaf.set_grad({});
    }
    return grad;
  };
  expect_close(gradient(true), gradient(false), 0, 0);
}

/// The loss after some steps of a small classifier that is kept in float32.
double trained_loss(Device device, std::optional<DType> dtype, bool scales) {
  manual_seed(3);
  nn::Linear fc1(16, 64), fc2(64, 4);
  nn::LayerNorm norm({64});
  Tensors parameters;
  for (nn::Module* module :
       {static_cast<nn::Module*>(&fc1), static_cast<nn::Module*>(&norm), static_cast<nn::Module*>(&fc2)}) {
    module->to(device);
    for (const Tensor& parameter : module->parameters()) {
      parameters.push_back(parameter);
    }
  }
  const Tensor x = randn({64, 16}, float32, device);
  const Tensor targets = argmax(slice(x, 1, 0, 4), 1);
  optim::AdamW optimizer(parameters, {.lr = 1e-2});
  optim::GradScaler scaler({.init_scale = 1e8, .growth_interval = 20});
  double loss_value = 0;
  for (int step = 0; step < 60; ++step) {
    Tensor loss;
    {
      const Autocast guard(dtype);
      loss = cross_entropy(fc2(gelu(norm(fc1(x)))), targets);
    }
    EXPECT_EQ(loss.dtype(), float32);
    optimizer.zero_grad();
    if (scales) {
      scaler.scale(loss).backward();
      optimizer.step({.max_grad_norm = 1, .scaler = &scaler});
      scaler.update();
    } else {
      loss.backward();
      optimizer.step({.max_grad_norm = 1});
    }
    loss_value = loss.item();
  }
  if (scales) {
    EXPECT_LT(scaler.scale(), 1e8) << "the first scale was to overflow";
  }
  return loss_value;
}

TEST(Autocast, TrainsLikeFloat32) {
  for (const Device device : test_devices()) {
    const double reference = trained_loss(device, std::nullopt, false);
    EXPECT_LT(reference, 0.05);
    EXPECT_NEAR(trained_loss(device, bfloat16, false), reference, 0.2 * reference);
    EXPECT_NEAR(trained_loss(device, float16, true), reference, 0.5 * reference);
  }
}

}  // namespace
