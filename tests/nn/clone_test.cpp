#include <tests/support.h>

#include <functional>
#include <map>

#include <mica/autograd/grad_mode.h>
#include <mica/nn/activation.h>
#include <mica/nn/clone.h>
#include <mica/nn/containers.h>
#include <mica/nn/linear.h>
#include <mica/nn/lora.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/sum.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// A user's module: its own members, a list and a map of tensors, a function that captures a parameter, a tied weight.
struct Net : nn::Module {
  Net() {
    for (int i = 0; i < 3; ++i) {
      scales.push_back(param("scale" + std::to_string(i), full({2}, i + 1)));
    }
    by_name["shift"] = param("shift", ones({2}));
    add = [shift = by_name["shift"]](const Tensor& x) { return x + shift; };
    body.push_back(nn::Linear{2, 2});
    body.push_back(nn::GELU{});
    body.push_back([w = scales[0]](const Tensor& x) { return x * w; });
  }
  Tensor operator()(const Tensor& x) const {
    Tensor y = tail(body(add(x)));
    for (const Tensor& scale : scales) {
      y = y * scale;
    }
    return y * constant + mean;
  }

  std::vector<Tensor> scales;
  std::map<std::string, Tensor> by_name;
  std::function<Tensor(const Tensor&)> add;
  nn::Sequential body = child("body", nn::Sequential{});
  nn::Linear tail = child("tail", nn::Linear{2, 2, {.bias = false}});
  nn::Linear tied = child("tied", nn::Linear{tail.weight});
  Tensor constant = full({2}, 0.5);
  Tensor mean = buffer("mean", full({2}, 3));
  Tensor fixed = fixed_buffer("fixed", full({2}, 0.25));
};

// No parameter or buffer of one is one of the other's, and no elements are shared.
void expect_independent(const nn::Module& a, const nn::Module& b) {
  for (const auto& [name, x] : a.state_dict()) {
    for (const auto& [other, y] : b.state_dict()) {
      EXPECT_NE(x.handle()->storage, y.handle()->storage) << name << ", " << other;
    }
  }
}

TEST(Clone, CopiesAUsersModule) {
  Net net;
  const Tensor x = from_data({1.0, -2.0}, {1, 2});
  const std::vector<double> y = to_vector<double>(net(x));
  net.scales[1].requires_grad_(false);
  net.tail.eval();
  sum(net(x)).backward();
  const Net copy = nn::clone(net);
  expect_close(copy(x), y, 0, 0);
  expect_independent(net, copy);

  const auto names = [](const nn::Module& module) {
    std::vector<std::string> result;
    for (const auto& [name, tensor] : module.named_parameters()) {
      result.push_back(name);
    }
    return result;
  };
  EXPECT_EQ(names(copy), names(net));
  EXPECT_EQ(copy.state_dict().size(), net.state_dict().size());
  EXPECT_TRUE(copy.tied.weight.is_same(copy.tail.weight));
  EXPECT_TRUE(copy.parameters()[0].is_same(copy.scales[0]));
  EXPECT_TRUE(copy.constant.is_same(net.constant));  // not registered
  EXPECT_FALSE(copy.scales[1].requires_grad());
  EXPECT_TRUE(copy.scales[2].requires_grad());
  EXPECT_TRUE(copy.is_training() && !copy.tail.is_training());
  EXPECT_TRUE(net.scales[0].grad().defined() && !copy.scales[0].grad().defined());

  // Neither follows the other, and the members of the copy are its parameters.
  for (const Tensor& parameter : net.parameters()) {
    autograd::NoGrad no_grad;
    mul_(parameter, 0);
  }
  expect_close(copy(x), y, 0, 0);
  sum(copy(x)).backward();
  for (const auto& [name, parameter] : copy.named_parameters()) {
    EXPECT_EQ(parameter.grad().defined(), parameter.requires_grad()) << name;
  }
}

TEST(Clone, CopiesMicasModules) {
  nn::GPT gpt({.vocab = 11, .context = 8, .layers = 2, .heads = 2, .width = 32});
  nn::add_lora(gpt, {"*c_attn"}, {.rank = 2});
  const Tensor tokens = from_data<std::int64_t>({1, 2, 3}, {1, 3});
  const std::vector<double> y = to_vector<double>(gpt(tokens));
  nn::GPT copy = nn::clone(gpt);
  expect_independent(gpt, copy);
  expect_close(copy(tokens), y, 0, 0);
  EXPECT_TRUE(copy.lm_head.weight.is_same(copy.wte.weight));
  nn::merge_lora(copy);
  expect_close(gpt(tokens), y, 0, 0);
  EXPECT_TRUE(gpt.h[1].attn.c_attn.has_lora() && !copy.h[1].attn.c_attn.has_lora());
  nn::quantize(copy, {.group_size = 32});
  const nn::GPT quantized = nn::clone(copy);
  expect_independent(copy, quantized);
  expect_close(quantized(tokens), to_vector<double>(copy(tokens)), 0, 0);

  const nn::TransformerBlock block = nn::clone(gpt.h[1]);
  EXPECT_EQ(block.named_parameters()[0].first, "ln_1.weight");
  expect_independent(gpt, block);
}

TEST(Clone, CanBeMovedTrainedAndClonedAgain) {
  std::vector<Net> nets;
  nets.push_back(Net{});
  for (int i = 0; i < 4; ++i) {
    nets.push_back(nn::clone(nets.back()));  // moves its elements when it grows
  }
  const Tensor x = from_data({1.0, -2.0}, {1, 2});
  expect_close(nets[4](x), to_vector<double>(nets[0](x)), 0, 0);
  EXPECT_TRUE(nets[4].parameters()[0].is_same(nets[4].scales[0]));
  nets[4].to(float64);
  EXPECT_EQ(nets[4].scales[2].dtype(), float64);
  EXPECT_EQ(nets[4].fixed.dtype(), float32);
  EXPECT_EQ(nets[3].scales[2].dtype(), float32);
}

struct MoveOnly {
  std::unique_ptr<int> value;
  Tensor operator()(const Tensor& x) const { return x; }
};

TEST(Clone, OtherCopiesAreErrors) {
  const nn::Linear linear(2, 2);
  expect_error([&] { const nn::Linear copy(linear); }, "module: only nn::clone(module) copies a module");
  const nn::Sequential layers{nn::Linear{2, 2}, MoveOnly{}};
  expect_error([&] { nn::clone(layers); }, "clone: a layer of a Sequential cannot be copied");
  expect_error([&] { const nn::Linear copy(linear); }, "module: only nn::clone(module) copies a module");
  const Tensor same = linear.weight;  // nothing is left of the failed clone
  EXPECT_TRUE(same.is_same(linear.weight));
}

TEST(Clone, StateDictsDoNotFollowTheModel) {
  const nn::GPT gpt({.vocab = 11, .context = 8, .layers = 1, .heads = 2, .width = 8});
  const StateDict state = gpt.state_dict();
  StateDict best = clone(state);
  ASSERT_EQ(best.size(), state.size());
  const std::vector<double> before = to_vector<double>(gpt.wte.weight);
  {
    autograd::NoGrad no_grad;
    mul_(gpt.wte.weight, 2);
  }
  expect_close(best.at("wte.weight"), before, 0, 0);
  EXPECT_NE(to_vector<double>(state.at("wte.weight")), before);
  EXPECT_EQ(best.at("wte.weight").handle()->storage, best.at("lm_head.weight").handle()->storage);
  best["none"] = Tensor{};
  EXPECT_FALSE(clone(best).at("none").defined());
}

}  // namespace
