#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/detail/visible_tokens.h>
#include <mica/nn/init.h>
#include <mica/nn/models/bert.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

bool counts_padding(const BertConfig& c) { return c.kind == BertKind::roberta || c.kind == BertKind::xlm_roberta; }

const BertConfig& checked(const BertConfig& c) {
  const bool is_distilbert = c.kind == BertKind::distilbert;
  check(
      c.vocab >= 1 && c.context >= 1 && c.types >= (is_distilbert ? 0 : 1) && c.width >= 1 && c.hidden >= 1 &&
          c.layers >= 0 && c.layers <= detail::kMostLayers,
      "Bert: expected vocab, context, types, width and hidden of at least 1 and 0 to {} layers, got {}, {}, {}, {}, {} "
      "and {}",
      detail::kMostLayers, c.vocab, c.context, c.types, c.width, c.hidden, c.layers);
  check(c.heads >= 1 && c.width % c.heads == 0, "Bert: expected heads to divide width, got width {} and heads {}",
        c.width, c.heads);
  check(!is_distilbert || (c.types == 0 && !c.pooler), "Bert: DistilBERT has no token types and no pooler");
  check(c.padding >= 0 && c.padding < INT64_MAX - c.context, "Bert: expected a token for padding, got {}", c.padding);
  check(c.labels >= 1, "Bert: expected labels of at least 1, got {}", c.labels);
  check(c.pooler || !(c.next_sentence || (c.kind == BertKind::bert && c.head == EncoderHead::sequence)),
        "Bert: this head needs the pooler");
  return c;
}

}  // namespace

BertSelfAttention::BertSelfAttention(const BertConfig& c)
    : heads(checked(c).heads),
      dropout(c.attention_dropout),
      query(child("query", Linear{c.width, c.width})),
      key(child("key", Linear{c.width, c.width})),
      value(child("value", Linear{c.width, c.width})) {}

Tensor BertSelfAttention::operator()(const Tensor& x, const Tensor& visible) const {
  return call(*this, x, visible, [&](const Tensor& x, const Tensor& visible) {
    const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto by_head = [&](const Tensor& t) {
      return transpose(reshape(t, {batch, length, heads, width / heads}), 1, 2);
    };
    const Tensor y = scaled_dot_product_attention(by_head(query(x)), by_head(key(x)), by_head(value(x)),
                                                  {.dropout = is_training() ? dropout : 0, .mask = visible});
    return reshape(transpose(y, 1, 2), {batch, length, width});
  });
}

BertOutput::BertOutput(std::int64_t in, const BertConfig& c)
    : dense(child("dense", Linear{in, c.width})),
      norm(child("LayerNorm", LayerNorm{c.width, {.eps = c.norm_eps}})),
      dropout(child("dropout", Dropout{c.dropout})) {}

Tensor BertOutput::operator()(const Tensor& x, const Tensor& residual) const {
  return call(*this, x, residual, [&](const Tensor& x, const Tensor& residual) {
    return norm(dense.product(x), residual, dropout, dense.bias).y;
  });
}

BertAttention::BertAttention(const BertConfig& c)
    : self(child("self", BertSelfAttention{c})), output(child("output", BertOutput{c.width, c})) {}

Tensor BertAttention::operator()(const Tensor& x, const Tensor& visible) const {
  return call(*this, x, visible, [&](const Tensor& x, const Tensor& visible) { return output(self(x, visible), x); });
}

BertLayer::Intermediate::Intermediate(const BertConfig& c)
    : activation(c.activation), dense(child("dense", Linear{c.width, c.hidden})) {}

Tensor BertLayer::Intermediate::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return dense(x, activation); });
}

BertLayer::BertLayer(const BertConfig& c)
    : attention(child("attention", BertAttention{c})),
      intermediate(child("intermediate", Intermediate{c})),
      output(child("output", BertOutput{c.hidden, c})) {}

Tensor BertLayer::operator()(const Tensor& x, const Tensor& visible) const {
  return call(*this, x, visible, [&](const Tensor& x, const Tensor& visible) {
    const Tensor y = attention(x, visible);
    return output(intermediate(y), y);
  });
}

Bert::Embeddings::Embeddings(const BertConfig& c)
    : padding(counts_padding(checked(c)) ? std::optional(c.padding) : std::nullopt),
      word_embeddings(child("word_embeddings", Embedding{c.vocab, c.width})),
      position_embeddings(child("position_embeddings", Embedding{c.context + (padding ? *padding + 1 : 0), c.width})),
      token_type_embeddings(c.types > 0 ? std::optional(child("token_type_embeddings", Embedding{c.types, c.width}))
                                        : std::nullopt),
      norm(child("LayerNorm", LayerNorm{c.width, {.eps = c.norm_eps}})),
      dropout(child("dropout", Dropout{c.dropout})) {}

Tensor Bert::Embeddings::operator()(const Tensor& tokens, const Tensor& types) const {
  return call(*this, tokens, types, [&](const Tensor& tokens, const Tensor& types) {
    Tensor others;  // all but the words'
    if (padding) {
      // 1, 2, … for tokens that are not padding, 0 for others.
      const Tensor counted = (tokens != static_cast<double>(*padding)).to(int64);
      others = position_embeddings(cumsum(counted, 1) * counted + static_cast<double>(*padding));
    } else {
      others = slice(position_embeddings.weight, 0, 0, tokens.size(1));
    }
    if (token_type_embeddings) {
      others =
          others + (types.defined() ? (*token_type_embeddings)(types) : slice(token_type_embeddings->weight, 0, 0, 1));
    }
    return dropout(norm(word_embeddings(tokens) + others));
  });
}

Bert::Encoder::Encoder(const BertConfig& c) : layer(child("layer", ModuleList<BertLayer>{})) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layer.push_back(BertLayer{c});
  }
}

Bert::Pooler::Pooler(const BertConfig& c) : dense(child("dense", Linear{c.width, c.width})) {}

Bert::Bert(const BertConfig& c)
    : config(checked(c)),
      embeddings(child("embeddings", Embeddings{c})),
      encoder(child("encoder", Encoder{c})),
      pooler(c.pooler ? std::optional(child("pooler", Pooler{c})) : std::nullopt) {
  if (c.head == EncoderHead::masked_lm) {
    const Activation activation = counts_padding(c) ? Activation::gelu : c.activation;
    head.emplace(child("head", PredictionHead{c.width, activation, {}, {.eps = c.norm_eps}}));
    lm_head.emplace(child("lm_head", Linear{embeddings.word_embeddings.weight, zeros({c.vocab})}));
  } else if (c.head != EncoderHead::none) {
    if (c.head == EncoderHead::sequence && c.kind != BertKind::bert) {
      pre_classifier.emplace(child("pre_classifier", Linear{c.width, c.width}));
    }
    classifier.emplace(child("classifier", Linear{c.width, c.labels}));
  }
  if (c.next_sentence) {
    next_sentence.emplace(child("next_sentence", Linear{c.width, 2}));
  }
  for (const auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, 0.02);
    } else if (name.ends_with(".bias")) {
      init::constant_(parameter, 0);
    }
  }
}

Tensor Bert::operator()(const Tensor& tokens, const Tensor& visible, const Tensor& types) const {
  return call(*this, tokens, visible, types, [&](const Tensor& tokens, const Tensor& visible, const Tensor& types) {
    check(tokens.dim() == 2, "Bert: expected tokens of shape (B, T), got {}", tokens.shape());
    const std::int64_t batch = tokens.size(0), length = tokens.size(1);
    check(length <= config.context, "Bert: expected at most {} tokens, the context, got {}", config.context, length);
    check(!types.defined() || embeddings.token_type_embeddings, "Bert: this model has no token types");
    check(!types.defined() || types.shape() == tokens.shape(), "Bert: expected types of shape {}, got {}",
          tokens.shape(), types.defined() ? types.shape() : Shape{});
    const Tensor mask = visible.defined()
                            ? reshape(detail::visible_tokens("Bert", visible, batch, length), {batch, 1, 1, length})
                            : Tensor{};
    Tensor x = embeddings(tokens, types);
    for (const BertLayer& layer : encoder.layer) {
      x = layer(x, mask);
    }
    return x;
  });
}

Tensor Bert::first_token(const Tensor& features) const {
  check(features.dim() == 3 && features.size(1) >= 1, "Bert: expected features of shape (B, T, {}), T >= 1, got {}",
        config.width, features.shape());
  return select(features, 1, 0);
}

Tensor Bert::pooled(const Tensor& features) const {
  const Scope scope(*this);
  check(pooler.has_value(), "Bert: this model has no pooler");
  return tanh(pooler->dense(first_token(features)));
}

Tensor Bert::summary(const Tensor& features) const {
  switch (config.kind) {
    case BertKind::bert: return pooled(features);
    case BertKind::distilbert: return (*pre_classifier)(first_token(features), Activation::relu);
    case BertKind::roberta:
    case BertKind::xlm_roberta: break;
  }
  return tanh((*pre_classifier)(dropped(first_token(features))));
}

Tensor Bert::dropped(const Tensor& x) const { return dropout(x, config.head_dropout, is_training()); }

Tensor Bert::logits(const Tensor& features) const {
  const Scope scope(*this);
  switch (config.head) {
    case EncoderHead::masked_lm: return (*lm_head)((*head)(features));
    case EncoderHead::tokens: return (*classifier)(dropped(features));
    case EncoderHead::sequence: return (*classifier)(dropped(summary(features)));
    case EncoderHead::none: break;
  }
  fail("Bert: this model has no head");
}

Tensor Bert::next_sentence_logits(const Tensor& features) const {
  const Scope scope(*this);
  check(next_sentence.has_value(), "Bert: this model has no head for next sentences");
  return (*next_sentence)(pooled(features));
}

}  // namespace mica::nn
