#include <tests/nn/support.h>

#include <mica/core/rng.h>
#include <mica/nn/models/starcoder.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// tests/io/pretrained_test.cpp compares logits, loss, gradients and generated tokens with PyTorch's.

nn::StarcoderConfig tiny_starcoder() {
  return {.vocab = 7,
          .context = 16,
          .layers = 1,
          .heads = 4,
          .key_heads = 2,
          .width = 8,
          .hidden = 6,
          .rotary = {.theta = 100},
          .window = 2};
}

nn::Starcoder random_starcoder(const nn::StarcoderConfig& config) {
  nn::Starcoder model{config};
  for (const Tensor& parameter : model.parameters()) {
    parameter.set_data(randn(parameter.shape()) * 0.7);
  }
  return model;
}

TEST(Starcoder, NamesAndInitialValues) {
  nn::StarcoderConfig config = tiny_starcoder();
  const nn::Starcoder model{config};
  const std::vector<std::string> names = names_of(model.named_parameters());
  ASSERT_EQ(names.size(), 1 + 16 + 2u);
  EXPECT_EQ(names[1], "model.layers.0.input_layernorm.weight");
  EXPECT_EQ(names[4], "model.layers.0.self_attn.q_proj.bias");
  EXPECT_EQ(names[13], "model.layers.0.mlp.c_fc.weight");
  EXPECT_EQ(names[18], "model.norm.bias");
  EXPECT_TRUE(model.lm_head.weight.is_same(model.model.embed_tokens.weight));
  EXPECT_EQ(to_vector<double>(model.model.norm.weight), std::vector<double>(8, 1));
  EXPECT_EQ(to_vector<double>(model.model.layers[0].mlp.c_fc.bias), std::vector<double>(6, 0));
  config.bias = config.tied_head = false;
  EXPECT_EQ(nn::Starcoder{config}.named_parameters().size(), 1 + 10 + 2 + 1u);
}

TEST(Starcoder, Gradients) {
  manual_seed(1);
  nn::Starcoder model = random_starcoder(tiny_starcoder());
  check_gradients(model, randint(0, 7, {2, 4}));
  compare_devices(model, randint(0, 7, {2, 4}), 1e-3);
}

// Each of the three kinds of dropout changes the loss in training only.
TEST(Starcoder, Dropout) {
  for (double nn::StarcoderConfig::*const option :
       {&nn::StarcoderConfig::dropout, &nn::StarcoderConfig::attention_dropout,
        &nn::StarcoderConfig::embedding_dropout}) {
    manual_seed(2);
    nn::StarcoderConfig config = tiny_starcoder();
    config.*option = 0.5;
    nn::Starcoder model = random_starcoder(config);
    const Tensor tokens = randint(0, 7, {2, 6});
    EXPECT_NE(model.loss(tokens, tokens).item(), model.loss(tokens, tokens).item());
    model.eval();
    EXPECT_EQ(model.loss(tokens, tokens).item(), model.loss(tokens, tokens).item());
  }
}

TEST(Starcoder, Errors) {
  const auto with = [](auto change) {
    nn::StarcoderConfig config = tiny_starcoder();
    change(config);
    return nn::Starcoder{config};
  };
  expect_error([&] { with([](auto& c) { c.vocab = 0; }); },
               "Starcoder: expected vocab, width and hidden of at least 1");
  expect_error([&] { with([](auto& c) { c.layers = INT64_MAX; }); }, "0 to 4096 layers");
  expect_error([&] { with([](auto& c) { c.key_heads = 3; }); }, "expected key_heads to divide heads, got 3 and 4");
  const nn::Starcoder model{tiny_starcoder()};
  expect_error([&] { model(zeros({6}, int64)); }, "Starcoder: expected tokens of shape (B, T), got [6]");
  expect_error([&] { model.next_token_logits(zeros({1, 0}, int64)); }, "at least one token");
}

}  // namespace
