#include <tests/nn/support.h>

#include <mica/core/rng.h>
#include <mica/nn/models/llama.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// tests/io/pretrained_test.cpp compares logits, loss and gradients with PyTorch's.

nn::LlamaConfig tiny() {
  return {.vocab = 7,
          .context = 8,
          .layers = 2,
          .heads = 4,
          .key_heads = 2,
          .width = 8,
          .hidden = 6,
          .rotary = {.theta = 100},
          .tied_head = false};
}

TEST(Llama, NamesAndHeads) {
  nn::LlamaConfig config = tiny();
  const nn::Llama plain{config};
  std::vector<std::string> names = names_of(plain.named_parameters());
  ASSERT_EQ(names.size(), 1 + 2 * 9 + 2u);
  EXPECT_EQ(names[0], "model.embed_tokens.weight");
  EXPECT_EQ(names[1], "model.layers.0.input_layernorm.weight");
  EXPECT_EQ(names[2], "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(names[19], "model.norm.weight");
  EXPECT_EQ(names[20], "lm_head.weight");
  EXPECT_EQ(plain.state_dict().at("model.layers.1.self_attn.k_proj.weight").shape(), (Shape{4, 8}));
  EXPECT_EQ(plain.state_dict().at("model.layers.1.mlp.down_proj.weight").shape(), (Shape{8, 6}));
  config.tied_head = config.qkv_bias = config.output_bias = config.mlp_bias = config.qk_norm = true;
  config.head_width = 6;
  const nn::Llama full{config};
  EXPECT_TRUE(full.lm_head.weight.is_same(full.model.embed_tokens.weight));
  EXPECT_EQ(full.named_parameters().size(), 1 + 2 * (9 + 4 + 3 + 2) + 1u);
  EXPECT_EQ(full.state_dict().at("model.layers.0.self_attn.q_proj.bias").shape(), (Shape{24}));
  EXPECT_EQ(full.state_dict().at("model.layers.0.self_attn.q_norm.weight").shape(), (Shape{6}));
}

TEST(Llama, Gradients) {
  manual_seed(1);
  nn::LlamaConfig config = tiny();
  config.layers = 1;
  config.qkv_bias = config.qk_norm = true;
  nn::Llama llama{config};
  llama.to(float64);
  for (const Tensor& parameter : llama.parameters()) {
    parameter.set_data(randn(parameter.shape(), float64));
  }
  check_gradients(llama, randint(0, 7, {2, 3}));
  compare_devices(llama, randint(0, 7, {2, 3}), 1e-3);
}

// Of OLMo 2, Granite and Phi 4 mini.
TEST(Llama, GradientsOfOtherBlocks) {
  std::vector<nn::LlamaConfig> configs(3, tiny());
  configs[0].norms_after = configs[0].wide_qk_norm = true;
  configs[1].embedding_scale = 1.5;
  configs[1].residual_scale = 0.5;
  configs[1].logit_divisor = 0.75;
  configs[1].attention_scale = 0.25;
  configs[2].head_width = 6;
  configs[2].rotary.width = 4;
  for (nn::LlamaConfig& config : configs) {
    manual_seed(4);
    config.layers = 1;
    nn::Llama llama{config};
    llama.to(float64);
    for (const Tensor& parameter : llama.parameters()) {
      parameter.set_data(randn(parameter.shape(), float64));
    }
    check_gradients(llama, randint(0, 7, {2, 3}));
    compare_devices(llama, randint(0, 7, {2, 3}), 1e-3);
  }
}

TEST(Llama, LooksBackOnly) {
  manual_seed(2);
  const nn::Llama llama{tiny()};
  const Tensor tokens = randint(0, 7, {2, 6});
  const Tensor logits = llama(tokens);
  EXPECT_EQ(logits.shape(), (Shape{2, 6, 7}));
  expect_close(llama(slice(tokens, 1, 0, 4)), slice(logits, 1, 0, 4), 1e-5, 1e-6);
  expect_close(llama.next_token_logits(tokens), select(logits, 1, 5), 1e-5, 1e-6);
}

TEST(Llama, LossAndCheckpoints) {
  manual_seed(3);
  const Tensor tokens = randint(0, 7, {2, 6}), targets = randint(0, 7, {2, 6});
  nn::Llama llama{tiny()};
  const Tensor expected = cross_entropy(llama(tokens), targets);
  expected.backward();
  std::vector<std::vector<double>> gradients;
  for (const Tensor& parameter : llama.parameters()) {
    gradients.push_back(to_vector<double>(parameter.grad()));
  }
  for (const bool checkpoint : {false, true}) {
    llama.model.checkpoint = checkpoint;
    llama.zero_grad();
    const Tensor loss = llama.loss(tokens, targets);
    expect_close(loss, expected, 0, 0);
    loss.backward();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      expect_close(llama.parameters()[i].grad(), gradients[i], 1e-5, 1e-7);
    }
  }
}

// Documents packed into one row have the same loss and gradients as each document alone.
TEST(Llama, PackedDocumentsDoNotSeeEachOther) {
  for (const Device device : test_devices()) {
    for (const bool checkpoint : {false, true}) {
      manual_seed(6);
      nn::LlamaConfig config = tiny();
      config.qk_norm = config.checkpoint = checkpoint;
      if (checkpoint) {  // the row is longer than the original context, and no document is
        config.rotary = {.theta = 100,
                         .scaling = nn::RotaryScaling::longrope,
                         .factor = 2,
                         .original_context = 5,
                         .short_factors = {1.5},
                         .long_factors = {4}};
        config.rotated_layers = {true, false};
      }
      nn::Llama llama{config};
      for (const Tensor& parameter : llama.parameters()) {
        parameter.set_data(randn(parameter.shape()));
      }
      llama.to(device, float64);
      const auto integers = [&](const std::vector<std::int64_t>& list) {
        return from_data(list, {1, static_cast<std::int64_t>(list.size())}, device);
      };
      const Tensor alone = (llama.loss(integers({3, 1}), integers({1, 4})) * 2.0 +
                            llama.loss(integers({5, 2, 6, 0}), integers({2, 6, 0, 1})) * 4.0) *
                           (1.0 / 6);
      alone.backward();
      std::vector<std::vector<double>> gradients;
      for (const Tensor& parameter : llama.parameters()) {
        gradients.push_back(to_vector<double>(parameter.grad()));
      }
      llama.zero_grad();
      const nn::PackedDocuments packed{.positions = integers({0, 1, 0, 1, 2, 3}),
                                       .documents = integers({0, 0, 1, 1, 1, 1})};
      const Tensor tokens = integers({3, 1, 5, 2, 6, 0}), targets = integers({1, 4, 2, 6, 0, 1});
      const Tensor loss = llama.loss(tokens, targets, packed);
      expect_close(loss, alone, 1e-12, 0);
      loss.backward();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        expect_close(llama.parameters()[i].grad(), gradients[i], 1e-10, 1e-12, llama.named_parameters()[i].first);
      }
      EXPECT_GT(std::abs(llama.loss(tokens, targets).item() - loss.item()), 1e-3);
      expect_error([&] { llama.loss(tokens, targets, {.positions = integers({0}), .documents = {}}); },
                   "Llama: expected positions and documents of shape [1, 6], got [1, 1]");
    }
  }
}

TEST(Llama, Errors) {
  const auto with = [](auto change) {
    nn::LlamaConfig config = tiny();
    change(config);
    return nn::Llama{config};
  };
  expect_error([&] { with([](auto& c) { c.vocab = 0; }); }, "Llama: expected vocab, width and hidden of at least 1");
  expect_error([&] { with([](auto& c) { c.layers = INT64_MAX; }); }, "0 to 4096 layers");
  expect_error([&] { with([](auto& c) { c.key_heads = 3; }); }, "expected key_heads to divide heads, got 3 and 4");
  expect_error([&] { with([](auto& c) { c.width = 10; }); },
               "heads to divide width, got head_width 0, heads 4 and width 10");
  expect_error([&] { with([](auto& c) { c.head_width = 3; }); }, "expected heads of even width from 2 to 512, got 3");
  expect_error([&] { with([](auto& c) { c.rotated_layers = {true}; }); },
               "expected rotated_layers to be empty or to have 2 elements, got 1");
  expect_error([&] { with([](auto& c) { c.qk_norm = c.wide_qk_norm = true; }); }, "qk_norm or wide_qk_norm, not both");
  expect_error([&] { with([](auto& c) { c.residual_scale = 0; }); }, "expected scales above 0, got 1 of embeddings, 0");
  for (const std::int64_t width : {-2, 1, 4}) {
    expect_error([&] { with([&](auto& c) { c.rotary.width = width; }); },
                 fmt::format("expected to rotate an even number of a head's 2 elements, got {}", width));
  }
  const nn::Llama llama{tiny()};
  expect_error([&] { llama(zeros({6}, int64)); }, "Llama: expected tokens of shape (B, T), got [6]");
  expect_error([&] { llama.next_token_logits(zeros({1, 0}, int64)); }, "at least one token");
}

}  // namespace
