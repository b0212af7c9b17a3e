#include <tests/nn/support.h>

#include <mica/autograd/grad_mode.h>
#include <mica/core/rng.h>
#include <mica/nn/models/gemma.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// tests/io/pretrained_test.cpp compares logits, loss, gradients and generated tokens with PyTorch's.

nn::GemmaConfig tiny_gemma() {
  return {.vocab = 7,
          .context = 16,
          .window = 8,
          .layers = 2,
          .heads = 4,
          .key_heads = 2,
          .head_width = 4,
          .width = 8,
          .hidden = 6,
          .rotary = {.theta = 100},
          .query_scale = 3,
          .attention_cap = 1.5,
          .logit_cap = 2};
}

nn::Gemma random_gemma(const nn::GemmaConfig& config, double scale = 0.7) {
  nn::Gemma gemma{config};
  for (const Tensor& parameter : gemma.parameters()) {
    parameter.set_data(randn(parameter.shape()) * scale);
  }
  return gemma;
}

TEST(Gemma, NamesAndInitialValues) {
  const nn::Gemma gemma{tiny_gemma()};
  const std::vector<std::string> names = names_of(gemma.named_parameters());
  ASSERT_EQ(names.size(), 1 + 2 * 11 + 1u);
  EXPECT_EQ(names[0], "model.embed_tokens.weight");
  EXPECT_EQ(names[1], "model.layers.0.input_layernorm.weight");
  EXPECT_EQ(names[6], "model.layers.0.post_attention_layernorm.weight");
  EXPECT_EQ(names[23], "model.norm.weight");
  EXPECT_TRUE(gemma.lm_head.weight.is_same(gemma.model.embed_tokens.weight));
  for (const double w : to_vector<double>(gemma.model.norm.weight)) {
    EXPECT_EQ(w, 0);
  }
  const std::vector<double> embedding = to_vector<double>(gemma.model.embed_tokens.weight);
  double squares = 0;
  for (const double w : embedding) {
    squares += w * w;
  }
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(embedding.size())), 0.02, 0.008);
}

TEST(Gemma, Gradients) {
  for (const bool capped : {true, false}) {
    manual_seed(1);
    nn::GemmaConfig config = tiny_gemma();
    config.layers = 1;
    if (!capped) {
      config.attention_cap = config.logit_cap = 0;
    }
    nn::Gemma gemma = random_gemma(config);
    check_gradients(gemma, randint(0, 7, {2, 3}));
    compare_devices(gemma, randint(0, 7, {2, 3}), 1e-3);
  }
}

TEST(Gemma, CapsBoundScoresAndLogits) {
  manual_seed(2);
  nn::GemmaConfig config = tiny_gemma();
  const nn::Gemma gemma = random_gemma(config, 3);
  const Tensor tokens = randint(0, 7, {2, 6});
  const Tensor logits = gemma(tokens);
  double largest = 0;
  for (const double x : to_vector<double>(logits)) {
    largest = std::max(largest, std::abs(x));
  }
  EXPECT_LE(largest, config.logit_cap);
  EXPECT_GE(largest, 0.5 * config.logit_cap);
  // The same weights without a cap of the scores give other logits.
  config.attention_cap = 0;
  nn::Gemma uncapped{config};
  uncapped.load_state_dict(gemma.state_dict());
  const std::vector<double> a = to_vector<double>(logits), b = to_vector<double>(uncapped(tokens));
  double difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::abs(a[i] - b[i]));
  }
  EXPECT_GE(difference, 0.1);
}

TEST(Gemma, StepsWithACacheGiveTheSameLogits) {
  const autograd::NoGrad no_grad;
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      manual_seed(3);
      nn::GemmaConfig config = tiny_gemma();
      config.head_width = 32;  // for which there are decode kernels, without caps
      nn::Gemma gemma = random_gemma(config, 0.3);
      gemma.to(device, dtype);
      const Tensor tokens = randint(0, 7, {2, 8}, int64, device);
      const Tensor all = gemma(tokens);
      const double tolerance = dtype == float32 ? 1e-5 : 3e-2;
      expect_close(gemma.next_token_logits(tokens), select(all, 1, 7), tolerance, tolerance);
      nn::KeyValueCache cache = gemma.new_cache(2);
      expect_close(gemma(slice(tokens, 1, 0, 3), &cache), slice(all, 1, 0, 3), tolerance, tolerance);
      for (std::int64_t i = 3; i < 8; ++i) {
        expect_close(gemma.next_token_logits(slice(tokens, 1, i, i + 1), &cache), select(all, 1, i), tolerance,
                     tolerance, fmt::format("position {} on {}", i, device));
      }
      EXPECT_EQ(cache.length(), 8);
    }
  }
}

// A cache keeps only the window in every other layer, and gives the same logits as without it.
TEST(Gemma, LongerTextsThanTheWindow) {
  const autograd::NoGrad no_grad;
  manual_seed(4);
  for (const Device device : test_devices()) {
    nn::GemmaConfig config = tiny_gemma();
    config.window = 5;
    config.layers = 3;
    nn::Gemma gemma = random_gemma(config);
    gemma.to(device);
    const Tensor tokens = randint(0, 7, {2, 30}).to(device);
    const Tensor all = gemma(tokens);
    nn::KeyValueCache cache = gemma.new_cache(2);
    std::int64_t at = 0;
    for (const std::int64_t count : {3, 1, 7, 1, 1, 12, 1, 4}) {
      expect_close(gemma(slice(tokens, 1, at, at + count), &cache), slice(all, 1, at, at + count), 1e-4, 1e-5,
                   fmt::format("{} positions at {} on {}", count, at, device));
      at += count;
    }
    EXPECT_EQ(cache.keys(0).size(2), 5);
    EXPECT_GE(cache.keys(1).size(2), 30);
    // Padding does not count.
    nn::KeyValueCache padded = gemma.new_cache(2);
    padded.set_padding({1, 13});
    const Tensor logits = gemma.next_token_logits(tokens, &padded);
    for (const std::int64_t row : {0, 1}) {
      const Tensor text = slice(slice(tokens, 0, row, row + 1), 1, row == 0 ? 1 : 13, 30);
      expect_close(slice(logits, 0, row, row + 1), gemma.next_token_logits(text), 1e-4, 1e-5);
    }
  }
}

TEST(Gemma, LossAndCheckpoints) {
  manual_seed(5);
  const Tensor tokens = randint(0, 7, {2, 6}), targets = randint(0, 7, {2, 6});
  nn::Gemma gemma = random_gemma(tiny_gemma());
  const Tensor expected = cross_entropy(gemma(tokens), targets);
  expected.backward();
  std::vector<std::vector<double>> gradients;
  for (const Tensor& parameter : gemma.parameters()) {
    gradients.push_back(to_vector<double>(parameter.grad()));
  }
  for (const bool checkpoint : {false, true}) {
    gemma.model.checkpoint = checkpoint;
    gemma.zero_grad();
    const Tensor loss = gemma.loss(tokens, targets);
    expect_close(loss, expected, 0, 0);
    loss.backward();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      expect_close(gemma.parameters()[i].grad(), gradients[i], 1e-5, 1e-7);
    }
  }
}

TEST(Gemma, PackedDocumentsDoNotSeeEachOther) {
  for (const Device device : test_devices()) {
    manual_seed(6);
    nn::Gemma gemma = random_gemma(tiny_gemma());
    gemma.to(device, float64);
    const auto integers = [&](const std::vector<std::int64_t>& list) {
      return from_data(list, {1, static_cast<std::int64_t>(list.size())}, device);
    };
    const Tensor alone = (gemma.loss(integers({3, 1}), integers({1, 4})) * 2.0 +
                          gemma.loss(integers({5, 2, 6, 0}), integers({2, 6, 0, 1})) * 4.0) *
                         (1.0 / 6);
    const nn::PackedDocuments packed{.positions = integers({0, 1, 0, 1, 2, 3}),
                                     .documents = integers({0, 0, 1, 1, 1, 1})};
    const Tensor tokens = integers({3, 1, 5, 2, 6, 0}), targets = integers({1, 4, 2, 6, 0, 1});
    expect_close(gemma.loss(tokens, targets, packed), alone, 1e-12, 0);
    EXPECT_GT(std::abs(gemma.loss(tokens, targets).item() - alone.item()), 1e-3);
  }
}

TEST(Gemma, Errors) {
  const auto with = [](auto change) {
    nn::GemmaConfig config = tiny_gemma();
    change(config);
    return nn::Gemma{config};
  };
  expect_error([&] { with([](auto& c) { c.vocab = 0; }); }, "Gemma: expected vocab, width, hidden and window of at");
  expect_error([&] { with([](auto& c) { c.layers = INT64_MAX; }); }, "0 to 4096 layers");
  expect_error([&] { with([](auto& c) { c.key_heads = 3; }); }, "expected key_heads to divide heads, got 3 and 4");
  expect_error([&] { with([](auto& c) { c.head_width = 3; }); }, "expected heads of even width from 2 to 512, got 3");
  expect_error([&] { with([](auto& c) { c.query_scale = 0; }); }, "expected query_scale > 0 and caps >= 0, got 0");
  const nn::Gemma gemma{tiny_gemma()};
  expect_error([&] { gemma(zeros({6}, int64)); }, "Gemma: expected tokens of shape (B, T), got [6]");
  expect_error([&] { gemma.next_token_logits(zeros({1, 0}, int64)); }, "at least one token");
}

}  // namespace
