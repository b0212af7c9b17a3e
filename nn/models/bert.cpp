#include <mica/nn/detail/most_layers.h>
#include <mica/nn/detail/visible_tokens.h>
#include <mica/nn/init.h>
#include <mica/nn/models/bert.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const BertConfig& checked(const BertConfig& c) {
  check(
      c.vocab >= 1 && c.context >= 1 && c.types >= 1 && c.width >= 1 && c.hidden >= 1 && c.layers >= 0 &&
          c.layers <= detail::kMostLayers,
      "Bert: expected vocab, context, types, width and hidden of at least 1 and 0 to {} layers, got {}, {}, {}, {}, {} "
      "and {}",
      detail::kMostLayers, c.vocab, c.context, c.types, c.width, c.hidden, c.layers);
  check(c.heads >= 1 && c.width % c.heads == 0, "Bert: expected heads to divide width, got width {} and heads {}",
        c.width, c.heads);
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
    : word_embeddings(child("word_embeddings", Embedding{checked(c).vocab, c.width})),
      position_embeddings(child("position_embeddings", Embedding{c.context, c.width})),
      token_type_embeddings(child("token_type_embeddings", Embedding{c.types, c.width})),
      norm(child("LayerNorm", LayerNorm{c.width, {.eps = c.norm_eps}})),
      dropout(child("dropout", Dropout{c.dropout})) {}

Tensor Bert::Embeddings::operator()(const Tensor& tokens, const Tensor& types) const {
  return call(*this, tokens, types, [&](const Tensor& tokens, const Tensor& types) {
    const Tensor by_position = slice(position_embeddings.weight, 0, 0, tokens.size(1));
    const Tensor by_type =
        types.defined() ? token_type_embeddings(types) : slice(token_type_embeddings.weight, 0, 0, 1);
    return dropout(norm(word_embeddings(tokens) + by_type + by_position));
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

Tensor Bert::pooled(const Tensor& features) const {
  const Scope scope(*this);
  check(pooler.has_value(), "Bert: this model has no pooler");
  check(features.dim() == 3 && features.size(1) >= 1, "Bert: expected features of shape (B, T, {}), T >= 1, got {}",
        config.width, features.shape());
  return tanh(pooler->dense(select(features, 1, 0)));
}

}  // namespace mica::nn
