#include <tests/support.h>

#include <mica/core/copy.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/nn/linear.h>
#include <mica/nn/module.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/adamw.h>
#include <mica/optim/sgd.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

Tensor copy_of(const Tensor& x) { return (x.detach() + 0).requires_grad_(); }

/// Steps a 16-bit parameter beside a float32 one with the same gradients.
template <class Optimizer, class Options>
void expect_rounded_reference(Device device, DType dtype, Options options) {
  manual_seed(1);
  const Tensor x = randn({7, 613}, dtype, device).requires_grad_();
  const Tensor exact = x.detach().to(float32).requires_grad_();
  Optimizer optimizer({x}, options);
  Optimizer reference({exact}, options);
  for (int step = 0; step < 10; ++step) {
    const Tensor grad = randn({7, 613}, dtype, device);
    x.set_grad(grad);
    exact.set_grad(grad.to(float32));
    optimizer.step({.max_grad_norm = 5});
    reference.step({.max_grad_norm = 5});
    expect_close(x.detach(), exact.detach().to(dtype), 0, 0);
  }
  expect_close(optimizer.state_dict().at("state.0.master"), exact.detach(), 0, 0);
}

TEST(MasterWeights, MatchFloat32Parameters) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      expect_rounded_reference<optim::AdamW>(device, dtype, optim::AdamWOptions{.lr = 1e-4, .weight_decay = 0.1});
      expect_rounded_reference<optim::SGD>(device, dtype, optim::SGDOptions{.lr = 1e-4});
      expect_rounded_reference<optim::SGD>(device, dtype,
                                           optim::SGDOptions{.lr = 1e-4, .momentum = 0.9, .nesterov = true});
    }
  }
}

TEST(MasterWeights, KeepSmallUpdates) {
  for (const Device device : test_devices()) {
    for (const bool master : {true, false}) {
      const Tensor x = ones({1000}, bfloat16, device).requires_grad_();
      x.set_grad(ones({1000}, bfloat16, device));
      optim::SGD optimizer({x}, {.lr = 1e-3, .master_weights = master});
      for (int step = 0; step < 100; ++step) {
        optimizer.step();
      }
      // Half a unit in the last place below 1 is 2⁻⁹.
      expect_close(x, std::vector<double>(1000, master ? 0.8984375 : 1), 0, 0);
      EXPECT_EQ(optimizer.state_dict().contains("state.0.master"), master);
    }
  }
}

TEST(MasterWeights, FollowWritesToParameters) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({2000}, bfloat16, device).requires_grad_();
    optim::SGD optimizer({x}, {.lr = 1e-3});
    x.set_grad(ones({2000}, bfloat16, device));
    optimizer.step();
    const Tensor first = as_strided(x.detach(), {1}, {1}, 0);
    fill_data(first, 4);
    first.bump_version();
    optimizer.step();
    std::vector<double> expected(2000, static_cast<double>(1 - 1e-3f) - 1e-3);
    expected[0] = 4 - 1e-3;
    expect_close(optimizer.state_dict().at("state.0.master"), expected, 1e-6, 0);

    x.set_data(full({2000}, 0.5, bfloat16, device));
    x.set_grad(zeros({2000}, bfloat16, device));
    optimizer.step();
    expect_close(x, std::vector<double>(2000, 0.5), 0, 0);
  }
}

TEST(MasterWeights, FollowParametersThatMove) {
  for (const Device device : test_devices()) {
    manual_seed(2);
    const Tensor moved = randn({50}, bfloat16).requires_grad_();
    const Tensor stays = copy_of(moved);
    optim::AdamW optimizer({moved, stays}, {.lr = 1e-3});
    const auto step = [&] {
      const Tensor grad = randn({50}, bfloat16);
      moved.set_grad(grad.to(moved.device(), moved.dtype()));
      stays.set_grad(grad);
      optimizer.step();
    };
    for (int i = 0; i < 3; ++i) {
      step();
    }
    moved.set_data(moved.detach().to(device));
    for (int i = 0; i < 3; ++i) {
      step();
    }
    // The unrounded part moved along.
    expect_close(optimizer.state_dict().at("state.0.master"),
                 to_vector<double>(optimizer.state_dict().at("state.1.master")), 1e-6, 1e-7);

    moved.set_data(moved.detach().to(float32));
    step();
    EXPECT_FALSE(optimizer.state_dict().contains("state.0.master"));
    EXPECT_EQ(optimizer.state_dict().at("state.0.step").item(), 7);
    expect_close(moved, to_vector<double>(stays), 0x1p-7, 1e-3);
    moved.set_data(moved.detach().to(float16));
    step();
    EXPECT_EQ(optimizer.state_dict().at("state.0.master").device(), device);
    expect_close(moved, to_vector<double>(stays), 0x1p-7, 1e-3);
  }
}

TEST(MasterWeights, AreComparedWithTheParameterAfterALoad) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({3}, bfloat16, device).requires_grad_();
    optim::SGD optimizer({x}, {.lr = 1});
    x.set_grad(zeros({3}, bfloat16, device));
    optimizer.step();
    StateDict earlier = optimizer.state_dict();
    earlier.at("state.0.master") = earlier.at("state.0.master") + 0;  // a copy: 1
    x.set_grad(ones({3}, bfloat16, device));
    optimizer.step();
    // The loaded master weights belong to another value of the parameter, which was not written since the last step.
    optimizer.load_state_dict(earlier);
    x.set_grad(zeros({3}, bfloat16, device));
    optimizer.step();
    expect_close(x, std::vector<double>(3, 0), 0, 0);
    expect_close(optimizer.state_dict().at("state.0.master"), std::vector<double>(3, 0), 0, 0);
  }
}

TEST(MasterWeights, StateDictRoundTrip) {
  for (const Device device : test_devices()) {
    manual_seed(3);
    const Tensor x = randn({77}, bfloat16, device).requires_grad_();
    optim::AdamW first({x}, {.lr = 1e-3});
    const auto step = [&](optim::AdamW& optimizer, const Tensor& parameter, const Tensor& grad) {
      parameter.set_grad(grad.to(parameter.dtype()));
      optimizer.step();
    };
    for (int i = 0; i < 5; ++i) {
      step(first, x, randn({77}, bfloat16, device));
    }
    const Tensor y = copy_of(x);
    optim::AdamW second({y}, {.lr = 1e-3});
    second.load_state_dict(first.state_dict());
    for (int i = 0; i < 5; ++i) {
      const Tensor grad = randn({77}, bfloat16, device);
      step(first, x, grad);
      step(second, y, grad);
      expect_close(x, y, 0, 0);
    }
    expect_close(first.state_dict().at("state.0.master"), second.state_dict().at("state.0.master"), 0, 0);

    // A missing master is created from the parameter; an unneeded one is ignored.
    StateDict state = first.state_dict();
    state.erase("state.0.master");
    second.load_state_dict(state);
    y.set_grad(zeros({77}, bfloat16, device));
    optim::AdamW wide({x.detach().to(float32).requires_grad_()});
    wide.load_state_dict(first.state_dict());
    EXPECT_FALSE(wide.state_dict().contains("state.0.master"));
    step(second, y, randn({77}, bfloat16, device));
    EXPECT_TRUE(second.state_dict().contains("state.0.master"));

    state = first.state_dict();
    state["state.0.master"] = zeros({78});
    expect_error([&] { second.load_state_dict(state); }, "expected \"state.0.master\" of shape [77], got [78]");
    StateDict only;
    only["state.0.master"] = zeros({77});
    expect_error([&] { second.load_state_dict(only); }, "\"state.0.master\" was given without a step");
  }
}

struct Mlp : nn::Module {
  nn::Linear fc1 = child("fc1", nn::Linear{8, 32});
  nn::Linear fc2 = child("fc2", nn::Linear{32, 1});
  Tensor operator()(const Tensor& x) const { return fc2(tanh(fc1(x))); }
};

/// The loss after training on y = tanh(x₀ + x₁) with a small learning rate.
double trained_loss(Device device, DType dtype, bool master) {
  manual_seed(4);
  Mlp model;
  const Tensor x = randn({64, 8});
  const Tensor y = tanh(as_strided(x, {64, 1}, {8, 1}, 0) + as_strided(x, {64, 1}, {8, 1}, 1));
  model.to(device, dtype);
  optim::AdamW optimizer(model.parameters(), {.lr = 2e-4, .weight_decay = 0, .master_weights = master});
  const auto loss = [&] {
    const Tensor error = model(x.to(device, dtype)).to(float32) - y.to(device);
    return mean(error * error);
  };
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step({.max_grad_norm = 1});
  }
  return loss().item();
}

TEST(MasterWeights, TrainLikeFloat32) {
  const int threads = num_threads();
  set_num_threads(1);  // everything is small
  for (const Device device : test_devices()) {
    const double reference = trained_loss(device, float32, false);
    const double with = trained_loss(device, bfloat16, true);
    const double without = trained_loss(device, bfloat16, false);
    EXPECT_NEAR(with, reference, 0.05 * reference);
    EXPECT_GT(without, 1.2 * reference) << "the test is to show what masters are for";
  }
  set_num_threads(threads);
}

}  // namespace
