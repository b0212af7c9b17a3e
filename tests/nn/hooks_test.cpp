#include <tests/support.h>

#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/nn/activation.h>
#include <mica/nn/containers.h>
#include <mica/nn/features.h>
#include <mica/nn/linear.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/models/resnet.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/sum.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// y = weight · x
struct Scale : nn::Module {
  explicit Scale(double by) : weight(param("weight", full({}, by, float64))) {}
  Tensor operator()(const Tensor& x) const {
    return nn::call(*this, x, [this](const Tensor& x) { return x * weight; });
  }
  Tensor weight;
};

struct Sums {
  Tensor sum, difference;
};

struct SumAndDifference : nn::Module {
  Sums operator()(const Tensor& a, const Tensor& b) const {
    return nn::call(*this, a, b, [](const Tensor& a, const Tensor& b) { return Sums{a + b, a - b}; });
  }
};

struct ScaledTwice : nn::Module {
  Scale first = child("first", Scale{2});
  Scale second = child("second", Scale{3});
  Tensor operator()(const Tensor& x) const {
    return nn::call(*this, x, [this](const Tensor& x) { return second(first(x)); });
  }
};

TEST(ModuleHooks, ForwardHooksSeeAndReplaceValuesInOrder) {
  ScaledTwice net;
  const Tensor x = from_data<double>({1.0, -2.0});
  std::string order;
  auto pre = net.first.register_forward_pre_hook([&](const Tensors& inputs) {
    order += "p";
    return inputs.at(0) + 1;
  });
  auto seen = net.first.register_forward_hook([&](const Tensors& inputs, const Tensors& outputs) {
    order += "f";
    expect_close(inputs.at(0), {2, -1}, 0, 0);
    expect_close(outputs.at(0), {4, -2}, 0, 0);
  });
  auto replaced = net.first.register_forward_hook([&](const Tensors&, const Tensors& outputs) {
    order += "g";
    return Tensors{outputs.at(0) * 10};
  });
  auto outer = net.register_forward_hook([&](const Tensors&, const Tensors& outputs) {
    order += "o";
    expect_close(outputs.at(0), {120, -60}, 0, 0);
    return Tensor{};
  });
  expect_close(net(x), {120, -60}, 0, 0);
  EXPECT_EQ(order, "pfgo");
  EXPECT_TRUE(net.has_hooks() && net.first.has_hooks() && !net.second.has_hooks());
  for (auto* handle : {&pre, &seen, &replaced, &outer}) {
    handle->remove();
  }
  EXPECT_FALSE(net.has_hooks() || net.first.has_hooks());
  expect_close(net(x), {6, -12}, 0, 0);
  EXPECT_EQ(order, "pfgo");
}

TEST(ModuleHooks, HooksFollowAMovedModule) {
  ScaledTwice net;
  int calls = 0;
  net.first.register_forward_hook([&](const Tensors&, const Tensors&) { ++calls; });
  const ScaledTwice moved(std::move(net));
  moved(ones({1}, float64));
  EXPECT_EQ(calls, 1);
}

TEST(ModuleHooks, BackwardHooksSeeAndReplaceGradients) {
  ScaledTwice net;
  const Tensor x = from_data<double>({1.0, -2.0}).requires_grad_();
  int calls = 0;
  auto hook = net.second.register_backward_hook([&](const Tensors& grad_inputs, const Tensors& grad_outputs) {
    ++calls;
    expect_close(grad_outputs.at(0), {5, 7}, 0, 0);
    expect_close(grad_inputs.at(0), {15, 21}, 0, 0);
    return grad_inputs.at(0) * -1;
  });
  const Tensor y = net(x);
  y.backward(from_data<double>({5.0, 7.0}), {.retain_graph = true});
  EXPECT_EQ(calls, 1);
  expect_close(x.grad(), {-30, -42}, 0, 0);
  expect_close(net.second.weight.grad(), {5.0 * 2 - 7.0 * 4}, 0, 0);
  expect_close(net.first.weight.grad(), {-15.0 + 42}, 0, 0);
  y.backward(from_data<double>({5.0, 7.0}));
  EXPECT_EQ(calls, 2);
  hook.remove();
  x.set_grad({});
  net(x).backward(from_data<double>({5.0, 7.0}));
  EXPECT_EQ(calls, 2);
  expect_close(x.grad(), {30, 42}, 0, 0);
}

TEST(ModuleHooks, BackwardHooksOfSeveralInputsAndOutputs) {
  SumAndDifference module;
  const Tensor a = ones({2}, float64).requires_grad_(), b = ones({2}, float64);
  int calls = 0;
  module.register_backward_hook([&](const Tensors& grad_inputs, const Tensors& grad_outputs) {
    ++calls;
    ASSERT_EQ(grad_inputs.size(), 2u);
    ASSERT_EQ(grad_outputs.size(), 2u);
    EXPECT_FALSE(grad_outputs[0].defined());
    expect_close(grad_outputs[1], {4, 4}, 0, 0);
    expect_close(grad_inputs[0], {4, 4}, 0, 0);
    EXPECT_FALSE(grad_inputs[1].defined());
  });
  (module(a, b).difference * 4).backward(ones({2}, float64));
  EXPECT_EQ(calls, 1);
  expect_close(a.grad(), {4, 4}, 0, 0);
}

TEST(ModuleHooks, BackwardHookOfAModuleWhoseInputNeedsNoGradient) {
  ScaledTwice net;
  int calls = 0;
  net.first.register_backward_hook([&](const Tensors& grad_inputs, const Tensors& grad_outputs) {
    ++calls;
    EXPECT_FALSE(grad_inputs.at(0).defined());
    expect_close(grad_outputs.at(0), {3}, 0, 0);
  });
  net(ones({1}, float64)).backward();
  EXPECT_EQ(calls, 1);
}

TEST(ModuleHooks, SecondDerivativesPassThroughHooks) {
  ScaledTwice net;
  net.first.register_backward_hook([](const Tensors&, const Tensors&) {});
  const Tensor x = from_data<double>({2.0}).requires_grad_();
  const Tensor y = net(x * x);
  const Tensors first = autograd::grad({y}, {x}, {}, {.create_graph = true});
  expect_close(first[0], {24}, 0, 0);
  expect_close(autograd::grad({first[0]}, {x})[0], {12}, 0, 0);
}

TEST(ModuleHooks, WrongReplacementsAreErrors) {
  ScaledTwice net;
  const Tensor x = ones({2}, float64).requires_grad_();
  auto hook = net.first.register_forward_hook([](const Tensors&, const Tensors& y) { return Tensors{y[0], y[0]}; });
  expect_error([&] { net(x); }, "register_forward_hook: a hook of first (Scale) returned 2 tensors for 1 outputs");
  hook.remove();
  hook = net.first.register_forward_pre_hook([](const Tensors& y) { return Tensors{y[0], y[0]}; });
  expect_error([&] { net(x); }, "register_forward_pre_hook: a hook of first (Scale) returned 2 tensors for 1 inputs");
  hook.remove();
  hook = net.first.register_backward_hook([](const Tensors&, const Tensors&) { return ones({3}, float64); });
  expect_error([&] { net(x).backward(ones({2}, float64)); },
               "register_backward_hook: a hook of first (Scale) replaced a gradient of float64 [2] on cpu by one of "
               "float64 [3] on cpu");
}

TEST(ModuleHooks, FusedLayersCallTheHooksOfTheirParts) {
  nn::GPT gpt({.vocab = 11, .context = 8, .layers = 1, .heads = 2, .width = 8});
  const Tensor tokens = from_data<std::int64_t>({1, 2, 3}, {1, 3});
  const Tensor plain = gpt(tokens);
  Shape hidden;
  gpt.h[0].mlp.c_fc.register_forward_hook(
      [&](const Tensors&, const Tensors& outputs) { hidden = outputs.at(0).shape(); });
  expect_close(gpt(tokens), to_vector<double>(plain), 1e-5, 1e-6);
  EXPECT_EQ(hidden, (Shape{1, 3, 32}));
}

TEST(Features, CapturesOutputsByName) {
  nn::GPT gpt({.vocab = 11, .context = 8, .layers = 2, .heads = 2, .width = 8});
  const Tensor tokens = from_data<std::int64_t>({1, 2, 3}, {1, 3});
  {
    nn::Features features(gpt, {"ln_f", "h.?.attn"});
    EXPECT_EQ(features.names(), (std::vector<std::string>{"h.0.attn", "h.1.attn", "ln_f"}));
    expect_error([&] { features["ln_f"]; }, "Features: ln_f was not called");
    expect_error([&] { features["wte"]; }, "Features: wte is not watched");
    const Tensor logits = gpt(tokens);
    EXPECT_EQ(features["h.1.attn"].shape(), (Shape{1, 3, 8}));
    EXPECT_EQ(features.all("ln_f").size(), 2u);  // the sum of the residual and the branch, and its norm
    features.clear();
    expect_error([&] { features["ln_f"]; }, "Features: ln_f was not called");
  }
  EXPECT_FALSE(gpt.ln_f.has_hooks());
  expect_error([&] { nn::Features(gpt, {"h.7"}); }, "Features: no module's name matches h.7");
  expect_error([&] { nn::Features(gpt, {}); }, "Features: expected at least one pattern");
}

TEST(Features, OfAConvolutionalNetwork) {
  nn::ResNet net({.depth = 18, .classes = 3, .small_images = true});
  net.eval();
  nn::Features features(net, {"layer4.1", "layer2.0.downsample", "conv1", "layer1.?.bn2"});
  const autograd::NoGrad no_grad;
  net(randn({1, 3, 16, 16}));
  EXPECT_EQ(features["conv1"].shape(), (Shape{1, 64, 16, 16}));
  EXPECT_EQ(features["layer1.1.bn2"].shape(), (Shape{1, 64, 16, 16}));
  EXPECT_EQ(features["layer2.0.downsample"].shape(), (Shape{1, 128, 8, 8}));
  EXPECT_EQ(features["layer4.1"].shape(), (Shape{1, 512, 2, 2}));
}

}  // namespace
