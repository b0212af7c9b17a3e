#include <tests/nn/support.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include <mica/core/rng.h>
#include <mica/nn/models/modern_bert.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// tests/io/pretrained_test.cpp compares features, logits, loss and gradients with PyTorch's.

nn::ModernBertConfig tiny_modern() {
  return {.vocab = 7, .window = 4, .layers = 2, .heads = 2, .width = 8, .hidden = 6};
}

TEST(ModernBert, Gradients) {
  manual_seed(1);
  nn::ModernBert bert{tiny_modern()};
  bert.to(float64);
  for (const Tensor& parameter : bert.parameters()) {
    parameter.set_data(randn(parameter.shape(), float64));
  }
  check_gradients(bert, randint(0, 7, {2, 5}));
  compare_devices(bert, randint(0, 7, {2, 5}), 1e-3);
}

TEST(ModernBert, SeesNearTokensThatAreVisible) {
  nn::ModernBertConfig config = tiny_modern();
  config.windowed_layers = {true, true};
  for (const Device device : test_devices()) {
    manual_seed(2);
    nn::ModernBert bert{config};
    bert.to(device);
    bert.eval();
    // Two layers reach 2 · window / 2 tokens. Attention computes the longer text in blocks.
    for (const auto& [length, at] : {std::pair<std::int64_t, std::int64_t>{9, 8}, {150, 127}}) {
      std::vector<std::int64_t> text = to_vector<std::int64_t>(randint(0, 7, {length}));
      const Tensor features = bert(from_data<std::int64_t>(text, {1, length}, device));
      text[at] = (text[at] + 1) % 7;
      const Tensor changed = bert(from_data<std::int64_t>(text, {1, length}, device));
      for (std::int64_t t = 0; t < length; ++t) {
        const bool is_equal = to_vector<float>(select(changed, 1, t)) == to_vector<float>(select(features, 1, t));
        EXPECT_EQ(is_equal, std::abs(t - at) > 4) << t;
      }
    }
    const Tensor tokens = randint(0, 7, {1, 9}).to(device);
    // Padding, with and without a window mask.
    for (const std::int64_t padding : {0, 6}) {
      const std::int64_t length = 9 - padding, alone = length - 1;
      const Tensor text = slice(tokens, 1, 0, length);
      const Tensor visible = arange(static_cast<double>(length), int64, device) < static_cast<double>(alone);
      expect_close(slice(bert(text, reshape(visible, {1, length})), 1, 0, alone), bert(slice(text, 1, 0, alone)), 1e-5,
                   1e-6);
    }
  }
}

TEST(ModernBert, DropsOnlyInTraining) {
  manual_seed(3);
  for (double nn::ModernBertConfig::*const p :
       {&nn::ModernBertConfig::dropout, &nn::ModernBertConfig::attention_dropout, &nn::ModernBertConfig::mlp_dropout,
        &nn::ModernBertConfig::head_dropout}) {
    nn::ModernBertConfig config = tiny_modern();
    config.head = nn::EncoderHead::tokens;
    config.*p = 0.5;
    nn::ModernBert bert{config};
    const Tensor tokens = randint(0, 7, {4, 6});
    EXPECT_NE(to_vector<float>(bert.logits(bert(tokens))), to_vector<float>(bert.logits(bert(tokens))));
    bert.eval();
    EXPECT_EQ(to_vector<float>(bert.logits(bert(tokens))), to_vector<float>(bert.logits(bert(tokens))));
  }
}

TEST(ModernBert, Errors) {
  const auto refuse = [](auto change, const char* message) {
    nn::ModernBertConfig config = tiny_modern();
    change(config);
    expect_error([&] { nn::ModernBert{config}; }, message);
  };
  refuse([](auto& c) { c.window = 0; }, "ModernBert: expected vocab, width, hidden, window and labels of at least 1");
  refuse([](auto& c) { c.layers = INT64_MAX; }, "0 to 4096 layers");
  refuse([](auto& c) { c.heads = 8; }, "ModernBert: expected heads to divide width, into an even number of columns");
  refuse([](auto& c) { c.windowed_layers = {true}; }, "expected windowed_layers to be empty or to have 2 elements");
  const nn::ModernBert bert{tiny_modern()};
  const Tensor tokens = zeros({2, 3}, int64);
  expect_error([&] { bert(zeros({3}, int64)); }, "ModernBert: expected tokens of shape (B, T), got [3]");
  expect_error([&] { bert(tokens, ones({2, 4}, int64)); }, "ModernBert: expected visible of shape [2, 3], got [2, 4]");
  expect_error([&] { bert.logits(bert(tokens)); }, "ModernBert: this model has no head");
}

}  // namespace
