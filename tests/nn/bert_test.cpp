#include <tests/nn/support.h>

#include <mica/core/rng.h>
#include <mica/nn/models/bert.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// tests/io/pretrained_test.cpp compares features, loss and gradients with PyTorch's.

constexpr nn::BertConfig kTiny{.vocab = 7, .context = 6, .layers = 2, .heads = 2, .width = 4, .hidden = 6};

TEST(Bert, Names) {
  const nn::Bert bert{kTiny};
  const std::vector<std::string> names = names_of(bert.named_parameters());
  ASSERT_EQ(names.size(), 5 + 2 * 16 + 2u);
  EXPECT_EQ(names[0], "embeddings.word_embeddings.weight");
  EXPECT_EQ(names[3], "embeddings.LayerNorm.weight");
  EXPECT_EQ(names[5], "encoder.layer.0.attention.self.query.weight");
  EXPECT_EQ(names.back(), "pooler.dense.bias");
  nn::BertConfig config = kTiny;
  config.pooler = false;
  EXPECT_EQ(nn::Bert{config}.named_parameters().size(), names.size() - 2);
}

TEST(Bert, Gradients) {
  manual_seed(1);
  nn::BertConfig config = kTiny;
  config.layers = 1;
  config.pooler = false;
  nn::Bert bert{config};
  bert.to(float64);
  for (const Tensor& parameter : bert.parameters()) {
    parameter.set_data(randn(parameter.shape(), float64));
  }
  check_gradients(bert, randint(0, 7, {2, 3}));
  compare_devices(bert, randint(0, 7, {2, 3}), 1e-3);
}

TEST(Bert, PaddingIsNotSeen) {
  for (const Device device : test_devices()) {
    manual_seed(2);
    nn::Bert bert{kTiny};
    bert.to(device);
    bert.eval();
    const Tensor tokens = randint(0, 7, {1, 6}).to(device);
    const Tensor visible = from_data<std::int64_t>({1, 1, 1, 1, 0, 0}, {1, 6}, device);
    const Tensor alone = bert(slice(tokens, 1, 0, 4));
    const Tensor padded = bert(tokens, visible);
    expect_close(slice(padded, 1, 0, 4), alone, 1e-5, 1e-6);
    expect_close(bert(tokens, visible != 0), padded, 0, 0);  // as bool
    expect_close(bert.pooled(padded), bert.pooled(alone), 1e-5, 1e-6);
    expect_close(bert(tokens, visible, zeros({1, 6}, int64, device)), padded, 1e-6, 1e-6);  // type 0 is the default
  }
}

// Positions are counted over the tokens that are not padding, wherever it is.
TEST(Bert, RobertaSkipsPadding) {
  nn::BertConfig config = kTiny;
  config.kind = nn::BertKind::roberta;
  config.padding = 2;
  for (const Device device : test_devices()) {
    manual_seed(4);
    nn::Bert bert{config};
    EXPECT_EQ(bert.embeddings.position_embeddings.weight.size(0), 6 + 2 + 1);
    bert.to(device);
    bert.eval();
    const Tensor padded = from_data<std::int64_t>({2, 2, 5, 3, 2, 1}, {1, 6}, device);
    const Tensor features = bert(padded, padded != 2);
    const Tensor alone = bert(from_data<std::int32_t>({5, 3, 1}, {1, 3}, device));
    expect_close(slice(features, 1, 2, 4), slice(alone, 1, 0, 2), 1e-5, 1e-6);
    expect_close(select(features, 1, 5), select(alone, 1, 2), 1e-5, 1e-6);
  }
}

TEST(Bert, HeadsDropOnlyInTraining) {
  for (const nn::BertKind kind : {nn::BertKind::bert, nn::BertKind::roberta, nn::BertKind::distilbert}) {
    manual_seed(5);
    nn::BertConfig config = kTiny;
    config.kind = kind;
    config.head = nn::EncoderHead::sequence;
    config.head_dropout = 0.5;
    if (kind == nn::BertKind::distilbert) {
      config.types = 0;
      config.pooler = false;
    }
    nn::Bert bert{config};
    const Tensor features = randn({64, 3, 4});
    EXPECT_EQ(bert.logits(features).shape(), (Shape{64, 2}));
    EXPECT_NE(to_vector<float>(bert.logits(features)), to_vector<float>(bert.logits(features)));
    bert.eval();
    EXPECT_EQ(to_vector<float>(bert.logits(features)), to_vector<float>(bert.logits(features)));
  }
}

TEST(Bert, DropsOnlyInTraining) {
  manual_seed(3);
  nn::BertConfig config = kTiny;
  config.dropout = config.attention_dropout = 0.5;
  nn::Bert bert{config};
  const Tensor tokens = randint(0, 7, {1, 6});
  EXPECT_NE(to_vector<float>(bert(tokens)), to_vector<float>(bert(tokens)));
  bert.eval();
  EXPECT_EQ(to_vector<float>(bert(tokens)), to_vector<float>(bert(tokens)));
}

TEST(Bert, Errors) {
  nn::BertConfig config = kTiny;
  config.heads = 3;
  expect_error([&] { nn::Bert{config}; }, "Bert: expected heads to divide width, got width 4 and heads 3");
  config = kTiny;
  config.types = 0;
  expect_error([&] { nn::Bert{config}; }, "Bert: expected vocab, context, types");
  config = kTiny;
  config.layers = INT64_MAX;
  expect_error([&] { nn::Bert{config}; }, "0 to 4096 layers");
  config = kTiny;
  config.kind = nn::BertKind::distilbert;
  expect_error([&] { nn::Bert{config}; }, "Bert: DistilBERT has no token types and no pooler");
  config = kTiny;
  config.padding = -1;
  expect_error([&] { nn::Bert{config}; }, "Bert: expected a token for padding, got -1");
  config = kTiny;
  config.labels = 0;
  expect_error([&] { nn::Bert{config}; }, "Bert: expected labels of at least 1, got 0");
  config = kTiny;
  config.pooler = false;
  const nn::Bert bert{config};
  config.head = nn::EncoderHead::sequence;
  expect_error([&] { nn::Bert{config}; }, "Bert: this head needs the pooler");
  const Tensor tokens = zeros({2, 3}, int64);
  expect_error([&] { bert(zeros({3}, int64)); }, "Bert: expected tokens of shape (B, T), got [3]");
  expect_error([&] { bert(zeros({1, 7}, int64)); }, "Bert: expected at most 6 tokens, the context, got 7");
  expect_error([&] { bert(tokens, ones({2, 4}, int64)); }, "Bert: expected visible of shape [2, 3], got [2, 4]");
  expect_error([&] { bert(tokens, ones({2, 3})); }, "Bert: expected visible of bool or integers, got float32");
  expect_error([&] { bert(tokens, {}, zeros({3}, int64)); }, "Bert: expected types of shape [2, 3], got [3]");
  expect_error([&] { bert(tokens, {}, full({2, 3}, 2, int64)); }, "embedding: ");
  expect_error([&] { bert.pooled(bert(tokens)); }, "Bert: this model has no pooler");
  expect_error([&] { bert.logits(bert(tokens)); }, "Bert: this model has no head");
  expect_error([&] { bert.next_sentence_logits(bert(tokens)); }, "Bert: this model has no head for next sentences");
}

}  // namespace
