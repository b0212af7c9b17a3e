#include <tests/nn/support.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/philox.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/io/safetensors.h>
#include <mica/nn/models/gpt.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>

using namespace mica;
using namespace mica::testing_support;

namespace gpt_test {

constexpr nn::GPTConfig kTiny{.vocab = 7, .context = 6, .layers = 2, .heads = 2, .width = 4};

double standard_deviation(const Tensor& x) {
  double squares = 0;
  for (const double value : to_vector<double>(x)) {
    squares += value * value;
  }
  return std::sqrt(squares / static_cast<double>(x.numel()));
}

TEST(GPT, NamesAndTiedHead) {
  const nn::GPT gpt{kTiny};
  const std::vector<std::string> names = names_of(gpt.named_parameters());
  ASSERT_EQ(names.size(), 2 + 2 * 12 + 2u);
  EXPECT_EQ(names[0], "wte.weight");
  EXPECT_EQ(names[1], "wpe.weight");
  EXPECT_EQ(names[2], "h.0.ln_1.weight");
  EXPECT_EQ(names[14], "h.1.ln_1.weight");
  EXPECT_EQ(names.back(), "ln_f.bias");
  EXPECT_TRUE(gpt.lm_head.weight.is_same(gpt.wte.weight));
  EXPECT_EQ(gpt.state_dict().size(), names.size() + 1);
  EXPECT_TRUE(gpt.state_dict().contains("lm_head.weight"));
}

TEST(GPT, InitializesLikeGPT2) {
  manual_seed(1);
  const nn::GPT gpt{{.vocab = 200, .context = 100, .layers = 8, .heads = 2, .width = 64}};
  for (const auto& [name, parameter] : gpt.named_parameters()) {
    if (name.ends_with("c_proj.weight")) {
      EXPECT_NEAR(standard_deviation(parameter), 0.005, 0.0003) << name;
    } else if (parameter.dim() == 2) {
      EXPECT_NEAR(standard_deviation(parameter), 0.02, 0.001) << name;
    } else {
      expect_close(parameter, std::vector<double>(parameter.numel(), name.ends_with(".bias") ? 0 : 1), 0, 0, name);
    }
  }
}

TEST(GPT, Gradients) {
  manual_seed(2);
  nn::GPT gpt{{.vocab = 5, .context = 4, .layers = 1, .heads = 2, .width = 4}};
  gpt.to(float64);
  for (const Tensor& parameter : gpt.parameters()) {  // of the magnitude of a trained model's
    parameter.set_data(randn(parameter.shape(), float64));
  }
  check_gradients(gpt, randint(0, 5, {2, 3}));
  compare_devices(gpt, randint(0, 5, {2, 3}), 1e-3);
}

TEST(GPT, IsCausal) {
  manual_seed(3);
  nn::GPT gpt{kTiny};
  const Tensor tokens = randint(0, 7, {2, 6});
  const Tensor logits = gpt(tokens);
  EXPECT_EQ(logits.shape(), (Shape{2, 6, 7}));
  expect_close(gpt(slice(tokens, 1, 0, 4)), slice(logits, 1, 0, 4), 1e-5, 1e-6);
  expect_close(gpt.next_token_logits(tokens), select(logits, 1, 5), 1e-5, 1e-6);
}

TEST(GPT, LossIsTheCrossEntropyOfItsLogits) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      manual_seed(6);
      nn::GPT gpt{kTiny};
      gpt.to(device, dtype);
      const Tensor tokens = randint(0, 7, {3, 6}).to(device), targets = randint(0, 7, {3, 6}).to(device);
      const Tensor expected = cross_entropy(gpt(tokens), targets);
      expected.backward();
      std::vector<std::vector<double>> gradients;
      for (const Tensor& parameter : gpt.parameters()) {
        gradients.push_back(to_vector<double>(parameter.grad()));
      }
      gpt.zero_grad();
      const Tensor loss = gpt.loss(tokens, targets);
      expect_close(loss, expected, 0, 0);
      loss.backward();
      const double tolerance = dtype == float32 ? 1e-5 : dtype == float16 ? 1e-2 : 5e-2;
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        double largest = 0;
        for (const double value : gradients[i]) {
          largest = std::max(largest, std::abs(value));
        }
        expect_close(gpt.parameters()[i].grad(), gradients[i], 0, tolerance * largest);
      }
      const autograd::NoGrad no_grad;
      expect_close(gpt.loss(tokens, targets), expected, 0, 0);
    }
  }
}

// loss() has no second derivative, and its error says what has.
TEST(GPT, SecondDerivativeOfTheLoss) {
  manual_seed(7);
  const nn::GPT gpt{kTiny};
  const Tensor tokens = randint(0, 7, {1, 6}), targets = randint(0, 7, {1, 6});
  const auto second = [&](const Tensor& loss) {
    const Tensor& bias = gpt.ln_f.bias;
    const Tensor slope = autograd::grad({loss}, {bias}, {}, {.create_graph = true})[0];
    return autograd::grad({sum(slope * slope)}, {bias})[0];
  };
  expect_error([&] { second(gpt.loss(tokens, targets)); }, "call cross_entropy(model(tokens), targets)");
  EXPECT_GT(amax(abs(second(cross_entropy(gpt(tokens), targets)))).item(), 0);
}

// Documents packed into one row have the same loss and gradients as each document alone.
TEST(GPT, PackedDocumentsDoNotSeeEachOther) {
  for (const Device device : test_devices()) {
    for (const bool checkpoint : {false, true}) {
      manual_seed(6);
      nn::GPT gpt{kTiny};
      for (const Tensor& parameter : gpt.parameters()) {
        parameter.set_data(randn(parameter.shape()));
      }
      gpt.to(device);
      gpt.config.checkpoint = checkpoint;
      const auto integers = [&](const std::vector<std::int64_t>& list) {
        return from_data(list, {1, static_cast<std::int64_t>(list.size())}, device);
      };
      const Tensor alone = (gpt.loss(integers({3, 1}), integers({1, 4})) * 2.0 +
                            gpt.loss(integers({5, 2, 6, 0}), integers({2, 6, 0, 1})) * 4.0) *
                           (1.0 / 6);
      alone.backward();
      std::vector<std::vector<double>> gradients;
      for (const Tensor& parameter : gpt.parameters()) {
        gradients.push_back(to_vector<double>(parameter.grad()));
      }
      gpt.zero_grad();
      const nn::PackedDocuments packed{.positions = integers({0, 1, 0, 1, 2, 3}),
                                       .documents = integers({0, 0, 1, 1, 1, 1})};
      const Tensor tokens = integers({3, 1, 5, 2, 6, 0}), targets = integers({1, 4, 2, 6, 0, 1});
      const Tensor loss = gpt.loss(tokens, targets, packed);
      expect_close(loss, alone, 1e-5, 0);
      loss.backward();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        expect_close(gpt.parameters()[i].grad(), gradients[i], 1e-4, 1e-5, gpt.named_parameters()[i].first);
      }
      EXPECT_GT(std::abs(gpt.loss(tokens, targets).item() - loss.item()), 1e-3);
      expect_error([&] { gpt.loss(tokens, targets, {.positions = integers({0}), .documents = {}}); },
                   "expected positions and documents of shape [1, 6], got [1, 1]");
      expect_error(
          [&] {
            gpt.loss(tokens, targets, {.positions = {}, .documents = zeros({1, 6}).to(device)});
          },
          "document_mask: expected integers of shape (B, T), got [1, 6] of float32");
    }
  }
}

TEST(GPT, SizesOfGPT2) {
  // With 50257 tokens, as published.
  const std::pair<const char*, std::int64_t> sizes[] = {
      {"124m", 124439808}, {"350m", 354823168}, {"774m", 774030080}, {"1558m", 1557611200}};
  for (const auto& [name, parameters] : sizes) {
    const nn::GPTConfig c = nn::gpt2_config(name);
    const std::int64_t block = 12 * c.width * c.width + 13 * c.width;
    EXPECT_EQ((50257 + c.context + 2) * c.width + c.layers * block, parameters) << name;
    EXPECT_EQ(c.width % c.heads, 0);
    EXPECT_EQ(c.vocab, 50304);
    EXPECT_TRUE(c.bias);
  }
  expect_error([] { nn::gpt2_config("124M"); }, "expected 124m, 350m, 774m or 1558m, got 124M");
}

// GPT-2's configuration has a dropout for each of three places.
TEST(GPT, HasThreeDropouts) {
  manual_seed(9);
  const nn::GPTConfig config{.vocab = 7, .context = 6, .layers = 1, .heads = 2, .width = 8};
  const Tensor tokens = randint(0, 7, {2, 6});
  const auto is_random = [&](const nn::GPT& gpt) {
    const autograd::NoGrad no_grad;
    return to_vector<float>(gpt(tokens)) != to_vector<float>(gpt(tokens));
  };
  EXPECT_FALSE(is_random(nn::GPT(config)));
  nn::GPTConfig attention = config, embedding = config, residual = config;
  attention.attention_dropout = 0.5;
  embedding.embedding_dropout = 0.5;
  residual.dropout = 0.5;
  residual.attention_dropout = residual.embedding_dropout = 0;
  for (const nn::GPTConfig& each : {attention, embedding, residual}) {
    nn::GPT gpt(each);
    EXPECT_TRUE(is_random(gpt));
    gpt.eval();
    EXPECT_FALSE(is_random(gpt));
  }
  residual.dropout = 0;
  EXPECT_FALSE(is_random(nn::GPT(residual)));
}

TEST(GPT, Errors) {
  expect_error([] { nn::GPT({.vocab = 5, .context = 4, .layers = 1, .heads = 3, .width = 4}); },
               "GPT: expected heads to divide width, got width 4 and heads 3");
  expect_error([] { nn::GPT({.vocab = 0}); }, "GPT: expected vocab");
  expect_error([] { nn::GPT({.vocab = 1, .context = 1, .layers = INT64_MAX, .heads = 1, .width = 1}); },
               "1 and 0 to 4096 layers, got 1, 1, 1 and 9223372036854775807");
  const nn::GPT gpt{kTiny};
  expect_error([&] { gpt(zeros({6}, int64)); }, "GPT: expected tokens of shape (B, T), got [6]");
  expect_error([&] { gpt(zeros({1, 7}, int64)); }, "GPT: expected at most 6 tokens, the context, got 7");
  expect_error([&] { gpt(full({1, 2}, 7, int64)); }, "embedding: ");
  expect_error([&] { gpt.next_token_logits(zeros({1, 0}, int64)); }, "at least one token");
}

TEST(GPT, MemorizesAndGeneratesASequence) {
  for (const Device device : test_devices()) {
    manual_seed(4);
    nn::GPT gpt{{.vocab = 11, .context = 12, .layers = 2, .heads = 2, .width = 32, .dropout = 0.05}};
    gpt.to(device);
    const std::vector<std::int64_t> text{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 10};
    const Tensor sequence = from_data(text, {1, 13}, device);
    const Tensor tokens = slice(sequence, 1, 0, 12), targets = slice(sequence, 1, 1, 13);
    optim::AdamW optimizer(optim::AdamW::decay_matrices(gpt.parameters(), {.lr = 3e-3, .weight_decay = 0.1}));
    double first = 0;
    for (int step = 0; step < 100; ++step) {
      const Tensor loss = cross_entropy(gpt(tokens), targets);
      if (step == 0) {
        first = loss.item();
      }
      optimizer.zero_grad();
      loss.backward();
      optimizer.step({.max_grad_norm = 1});
    }
    EXPECT_NEAR(first, std::log(11.0), 0.2);
    gpt.eval();
    EXPECT_LT(cross_entropy(gpt(tokens), targets).item(), 0.1);

    const infer::GenerateOptions greedy{.count = 12, .sampling = {.temperature = 0}};
    EXPECT_EQ(infer::generate(gpt, {{text[0]}}, greedy)[0], std::vector<std::int64_t>(text.begin() + 1, text.end()));

    const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "mica_gpt_test.safetensors";
    io::save(path, gpt.state_dict());
    nn::GPT again{gpt.config};
    again.load_state_dict(io::load(path));
    again.eval();
    again.to(device);
    expect_close(again(tokens), gpt(tokens), 0, 0);
    std::filesystem::remove(path);
  }
}

TEST(GPT, ResidualProjectionsOfOneBlock) {
  manual_seed(3);
  const nn::GPT model({.vocab = 7, .context = 4, .layers = 1, .heads = 2, .width = 64});
  double squares = 0;
  for (const double w : to_vector<double>(model.state_dict().at("h.0.mlp.c_proj.weight"))) {
    squares += w * w;
  }
  // 0.02 / √2: two additions to the residual. The deviation of 16,384 numbers is accurate to 0.6 %.
  EXPECT_NEAR(std::sqrt(squares / (64 * 256)), 0.02 / std::sqrt(2.0), 0.02 * 0.02);
}

}  // namespace gpt_test
