#include <tests/support.h>

#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/rng.h>
#include <mica/nn/lora.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/models/llama.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Names = std::vector<std::string>;

TEST(Lora, IsItsDefinition) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const bool bias : {false, true}) {
      nn::Linear layer(5, 4, {.bias = bias});
      layer.to(device, float64);
      const Tensor x = randn({2, 3, 5}, float64, device);
      const Tensor plain = layer(x).detach();
      layer.add_lora({.rank = 2, .alpha = 6});
      expect_close(layer(x), plain, 1e-14, 1e-14);  // lora_b is 0
      EXPECT_EQ(layer.lora_a.shape(), (Shape{2, 5}));
      EXPECT_EQ(layer.lora_b.shape(), (Shape{4, 2}));
      EXPECT_EQ(layer.lora_a.dtype(), float64);
      EXPECT_EQ(layer.lora_a.device(), device);
      EXPECT_LE(max(abs(layer.lora_a)).item(), 1 / std::sqrt(5));
      layer.lora_b.set_data(randn({4, 2}, float64, device));
      const Tensor y = plain + matmul(matmul(x, transpose(layer.lora_a, 0, 1)), transpose(layer.lora_b, 0, 1)) * 3;
      expect_close(layer(x), y, 1e-12, 1e-12);
      expect_close(layer.product(x), bias ? y - layer.bias : y, 1e-12, 1e-12);
      expect_close(layer(x, Activation::relu), relu(y), 1e-12, 1e-12);
      expect_close(layer(x, Activation::leaky_relu), leaky_relu(y), 1e-12, 1e-12);
      expect_close(layer(x, Activation::gelu), gelu(y), 1e-12, 1e-12);
      expect_close(layer(x, Activation::gelu_tanh), gelu(y, GeluApproximation::tanh), 1e-12, 1e-12);
      const auto f = [&](const Tensor& t) { return layer(t, Activation::gelu); };
      EXPECT_TRUE(autograd::gradcheck(f, {x}));
      EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
      EXPECT_EQ(layer.state_dict().size(), bias ? 4U : 3U);
      layer.merge_lora();
      EXPECT_FALSE(layer.has_lora());
      EXPECT_EQ(layer.state_dict().size(), bias ? 2U : 1U);
      expect_close(layer(x), y, 1e-12, 1e-12);
    }
  }
}

TEST(Lora, ALinearWithAnAdapterFromTheBeginning) {
  manual_seed(4);
  const nn::Linear plain(32, 4);
  nn::Linear rounded(plain.weight, plain.bias);
  rounded.quantize({.bits = 8});
  const Tensor x = randn({3, 32});
  for (const nn::Linear* const linear : {&plain, static_cast<const nn::Linear*>(&rounded)}) {
    const Tensor before = (*linear)(x);
    nn::LoRALinear layer(*linear, {.rank = 2, .alpha = 6});
    expect_close(layer(x), before, 0, 0);
    EXPECT_EQ(layer.is_quantized(), linear->is_quantized());
    EXPECT_EQ(nn::trainable_parameters(layer).size(), 2u);
    EXPECT_EQ(nn::adapted_layers(layer).size(), 1u);
    layer.lora_b.set_data(ones({4, 2}));
    expect_close(layer(x), before + matmul(matmul(x, transpose(layer.lora_a, 0, 1)), ones({2, 4})) * 3, 1e-5, 1e-5);
    expect_error([&] { nn::LoRALinear again(static_cast<const nn::Linear&>(layer)); },
                 "LoRALinear: the layer has an adapter already");
  }
  const nn::LoRALinear alone(5, 4, {.rank = 3}, {.bias = false});
  EXPECT_EQ(alone.lora_a.shape(), (Shape{3, 5}));
  EXPECT_FALSE(alone.bias.defined());
  EXPECT_FALSE(alone.weight.requires_grad());
}

TEST(Lora, DropsItsInputInTraining) {
  manual_seed(2);
  nn::Linear layer(50, 3, {.bias = false});
  layer.add_lora({.rank = 4, .alpha = 4, .dropout = 0.5});
  layer.lora_b.set_data(ones({3, 4}));
  const Tensor x = ones({2, 50});
  EXPECT_NE(to_vector<float>(layer(x)), to_vector<float>(layer(x)));
  layer.eval();
  EXPECT_EQ(to_vector<float>(layer(x)), to_vector<float>(layer(x)));
}

TEST(Lora, FreezesAllButTheAdapters) {
  manual_seed(3);
  nn::GPT gpt({.vocab = 7, .context = 6, .layers = 2, .heads = 1, .width = 4});
  const Tensor tokens = randint(0, 7, {2, 5});
  const Tensor logits = no_grad([&] { return gpt(tokens); });
  const std::size_t parameters = gpt.parameters().size();
  EXPECT_EQ(nn::add_lora(gpt, {"h.?.mlp.*", "*c_attn"}, {.rank = 2}),
            (Names{"h.0.attn.c_attn", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "h.1.attn.c_attn", "h.1.mlp.c_fc",
                   "h.1.mlp.c_proj"}));
  EXPECT_EQ(gpt.parameters().size(), parameters + 12);
  EXPECT_EQ(nn::trainable_parameters(gpt).size(), 12U);
  expect_close(no_grad([&] { return gpt(tokens); }), logits, 1e-5, 1e-6);
  gpt.loss(tokens, tokens).backward();
  for (const auto& [name, parameter] : gpt.named_parameters()) {
    EXPECT_EQ(parameter.grad().defined(), name.find("lora") != std::string::npos) << name;
  }
  // The MLP's adapters also work, although its layers are one op without adapters.
  for (const Tensor& parameter : nn::trainable_parameters(gpt)) {
    parameter.set_data(randn(parameter.shape()));
  }
  const autograd::NoGrad no_grad;
  const Tensor adapted = gpt(tokens);
  EXPECT_GT(max(abs(adapted - logits)).item(), 0.1);
  nn::GPT moved(std::move(gpt));
  expect_close(moved(tokens), adapted, 0, 0);
  nn::merge_lora(moved);
  expect_close(moved(tokens), adapted, 1e-3, 1e-4);
  EXPECT_EQ(moved.parameters().size(), parameters);
}

// A merged weight of 16 bits is the exact sum, rounded once. All values here are multiples of 1/64, so that the sum is
// exact in float32.
TEST(Lora, MergesInto16BitsWithOneRounding) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      const auto draw = [&](const Shape& shape, double unit) {
        return (randint(-60, 60, shape).to(float64) * unit).to(device, dtype);
      };
      nn::Linear layer(draw({32, 16}, 1.0 / 8));
      layer.add_lora({.rank = 4, .alpha = 2});
      layer.lora_a.set_data(draw({4, 16}, 1.0 / 8));
      layer.lora_b.set_data(draw({32, 4}, 1.0 / 4));
      const Tensor sum = layer.weight.detach().to(float64) +
                         matmul(layer.lora_b.detach().to(float64), layer.lora_a.detach().to(float64)) * 0.5;
      layer.merge_lora();
      EXPECT_EQ(layer.weight.dtype(), dtype);
      expect_close(layer.weight, sum.to(dtype), 0, 0);
    }
  }
}

TEST(Lora, CanBeRemoved) {
  manual_seed(8);
  nn::Linear layer(5, 4);
  const Tensor x = randn({3, 5}), before = layer(x).detach();
  layer.add_lora({.rank = 2});
  layer.lora_b.set_data(ones({4, 2}));
  layer.remove_lora();
  EXPECT_FALSE(layer.has_lora());
  EXPECT_EQ(layer.state_dict().size(), 2u);
  expect_close(layer(x), before, 0, 0);
  expect_error([&] { layer.remove_lora(); }, "Linear: there is no adapter to remove");
  const nn::LoraParameters parameters{.a = ones({2, 5}), .b = ones({4, 2})};
  expect_error([&] { layer.add_lora({.rank = 3}, parameters); },
               "Linear: expected an adapter of shapes [3, 5] and [4, 3], got [2, 5] and [4, 2]");
  layer.add_lora({.rank = 2, .alpha = 4}, parameters);
  expect_close(layer(x), before + matmul(matmul(x, ones({5, 2})), ones({2, 4})) * 2, 1e-5, 1e-5);
  expect_error([&] { layer.add_lora({.rank = 2}, parameters); }, "Linear: the layer already has an adapter");
}

TEST(Lora, Errors) {
  nn::LlamaConfig config{.vocab = 7, .layers = 1, .heads = 2, .key_heads = 1, .width = 8, .hidden = 8};
  nn::Llama llama(config);
  expect_error([&] { nn::add_lora(llama, {"*q_proj", "*norm*"}); }, "add_lora: no linear layer's name matches *norm*");
  expect_error([&] { nn::add_lora(llama, {}); }, "add_lora: expected at least one pattern");
  expect_error([&] { nn::add_lora(llama, {"*"}, {.rank = 0}); }, "lora: expected a rank of at least 1, got 0");
  expect_error([&] { nn::add_lora(llama, {"*"}, {.alpha = NAN}); }, "lora: expected a finite alpha, got nan");
  expect_error([&] { nn::add_lora(llama, {"*"}, {.dropout = 1}); }, "lora: expected a dropout in [0, 1), got 1");
  EXPECT_EQ(nn::trainable_parameters(llama).size(), llama.parameters().size());
  nn::add_lora(llama, {"*q_proj", "lm_head"});
  expect_error([&] { nn::add_lora(llama, {"*_proj"}); },
               "add_lora: model.layers.0.self_attn.q_proj already has an adapter");
  expect_error([&] { nn::merge_lora(llama); }, "merge_lora: lm_head shares its weight with model.embed_tokens.weight");
  EXPECT_EQ(nn::adapted_layers(llama).size(), 2U);
  nn::Linear layer(2, 2);
  expect_error([&] { layer.merge_lora(); }, "Linear: there is no adapter to merge");
  layer.add_lora({});
  expect_error([&] { layer.add_lora({}); }, "Linear: the layer already has an adapter");
}

}  // namespace
