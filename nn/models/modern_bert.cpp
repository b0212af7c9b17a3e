#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/detail/visible_tokens.h>
#include <mica/nn/init.h>
#include <mica/nn/models/modern_bert.h>
#include <mica/nn/pooling.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const ModernBertConfig& checked_modern(const ModernBertConfig& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1 && c.hidden <= INT64_MAX / 2 && c.window >= 1 && c.labels >= 1 &&
            c.layers >= 0 && c.layers <= detail::kMostLayers,
        "ModernBert: expected vocab, width, hidden, window and labels of at least 1 and 0 to {} layers, got {}, {}, "
        "{}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.width, c.hidden, c.window, c.labels, c.layers);
  check(c.heads >= 1 && c.width % c.heads == 0 && c.width / c.heads % 2 == 0,
        "ModernBert: expected heads to divide width, into an even number of columns, got width {} and heads {}",
        c.width, c.heads);
  check(c.windowed_layers.empty() || static_cast<std::int64_t>(c.windowed_layers.size()) == c.layers,
        "ModernBert: expected windowed_layers to be empty or to have {} elements, got {}", c.layers,
        c.windowed_layers.size());
  return c;
}

bool is_windowed(const ModernBertConfig& c, std::int64_t layer) {
  constexpr std::int64_t kPeriod = 3;
  return c.windowed_layers.empty() ? layer % kPeriod != 0 : c.windowed_layers[static_cast<std::size_t>(layer)];
}

LayerNorm norm_of(const ModernBertConfig& c) { return LayerNorm{c.width, {.eps = c.norm_eps, .bias = c.norm_bias}}; }

}  // namespace

ModernBertAttention::ModernBertAttention(const ModernBertConfig& c, std::int64_t layer)
    : heads(checked_modern(c).heads),
      dropout(c.attention_dropout),
      reach(is_windowed(c, layer) ? std::optional(c.window / 2) : std::nullopt),
      qkv(child("Wqkv", Linear{c.width, 3 * c.width, {.bias = c.attention_bias}})),
      out(child("Wo", Linear{c.width, c.width, {.bias = c.attention_bias}})),
      rotary(child("rotary", RotaryEmbedding{c.width / heads, reach ? c.local_rotary : c.rotary})) {}

Tensor ModernBertAttention::operator()(const Tensor& x, const Tensor& mask) const {
  return call(*this, x, mask, [&](const Tensor& x, const Tensor& mask) {
    const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const Tensor all = reshape(qkv(x), {batch, length, 3, heads, width / heads});
    const Tensor q = transpose(rotary(select(all, 2, 0)), 1, 2), k = transpose(rotary(select(all, 2, 1)), 1, 2);
    const Tensor v = transpose(select(all, 2, 2), 1, 2);
    const double p = is_training() ? dropout : 0;
    AttentionOptions options{.dropout = p, .mask = mask};
    if (reach && length > *reach + 1) {
      // The 2 · reach + 1 keys up to the last one that the query sees.
      options.causal = true;
      options.causal_offset = *reach;
      options.window = 2 * *reach + 1;
    }
    const Tensor y = scaled_dot_product_attention(q, k, v, options);
    return mica::dropout(out(reshape(transpose(y, 1, 2), {batch, length, width})), p);
  });
}

ModernBertMlp::ModernBertMlp(const ModernBertConfig& c)
    : gelu(c.gelu),
      in(child("Wi", Linear{c.width, 2 * c.hidden, {.bias = c.mlp_bias}})),
      out(child("Wo", Linear{c.hidden, c.width, {.bias = c.mlp_bias}})),
      dropout(child("dropout", Dropout{c.mlp_dropout})) {}

Tensor ModernBertMlp::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return out(dropout(geglu(in(x), gelu))); });
}

ModernBertLayer::ModernBertLayer(const ModernBertConfig& c, std::int64_t layer)
    : attn_norm(layer > 0 ? std::optional(child("attn_norm", norm_of(checked_modern(c)))) : std::nullopt),
      attn(child("attn", ModernBertAttention{c, layer})),
      mlp_norm(child("mlp_norm", norm_of(c))),
      mlp(child("mlp", ModernBertMlp{c})) {}

Tensor ModernBertLayer::operator()(const Tensor& x, const Tensor& mask) const {
  return call(*this, x, mask, [&](const Tensor& x, const Tensor& mask) {
    const AddLayerNormResult attended = mlp_norm(attn(attn_norm ? (*attn_norm)(x) : x, mask), x);
    return attended.sum + mlp(attended.y);
  });
}

ModernBert::Embeddings::Embeddings(const ModernBertConfig& c)
    : tok_embeddings(child("tok_embeddings", Embedding{checked_modern(c).vocab, c.width})),
      norm(child("norm", norm_of(c))),
      dropout(child("dropout", Dropout{c.dropout})) {}

Tensor ModernBert::Embeddings::operator()(const Tensor& tokens) const {
  return call(*this, tokens, [&](const Tensor& tokens) { return dropout(norm(tok_embeddings(tokens))); });
}

ModernBert::ModernBert(const ModernBertConfig& c)
    : config(checked_modern(c)),
      embeddings(child("embeddings", Embeddings{c})),
      layers(child("layers", ModuleList<ModernBertLayer>{})),
      final_norm(child("final_norm", norm_of(c))) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layers.push_back(ModernBertLayer{c, i});
  }
  if (c.head != EncoderHead::none) {
    const Activation activation = c.head_gelu == GeluApproximation::tanh ? Activation::gelu_tanh : Activation::gelu;
    head.emplace(child(
        "head", PredictionHead{c.width, activation, {.bias = c.head_bias}, {.eps = c.norm_eps, .bias = c.norm_bias}}));
  }
  if (c.head == EncoderHead::masked_lm) {
    const Tensor bias = c.decoder_bias ? zeros({c.vocab}) : Tensor{};
    lm_head.emplace(child("lm_head", Linear{embeddings.tok_embeddings.weight, bias}));
  } else if (c.head != EncoderHead::none) {
    classifier.emplace(child("classifier", Linear{c.width, c.labels}));
  }
  for (const auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, 0.02);
    } else if (name.ends_with("bias")) {
      init::constant_(parameter, 0);
    }
  }
}

Tensor ModernBert::operator()(const Tensor& tokens, const Tensor& visible) const {
  return call(*this, tokens, visible, [&](const Tensor& tokens, const Tensor& visible) {
    check(tokens.dim() == 2, "ModernBert: expected tokens of shape (B, T), got {}", tokens.shape());
    const std::int64_t batch = tokens.size(0), length = tokens.size(1);
    const Tensor mask =
        visible.defined() ? reshape(detail::visible_tokens("ModernBert", visible, batch, length), {batch, 1, 1, length})
                          : Tensor{};
    Tensor x = embeddings(tokens);
    for (const ModernBertLayer& layer : layers) {
      x = layer(x, mask);
    }
    return final_norm(x);
  });
}

Tensor ModernBert::logits(const Tensor& features, const Tensor& visible) const {
  const Scope scope(*this);
  check(head.has_value(), "ModernBert: this model has no head");
  check(features.dim() == 3 && features.size(1) >= 1,
        "ModernBert: expected features of shape (B, T, {}), T >= 1, got {}", config.width, features.shape());
  if (config.head == EncoderHead::masked_lm) {
    return (*lm_head)((*head)(features));
  }
  const Pooling pooling = config.mean_pooling ? Pooling::mean : Pooling::first;
  const Tensor x = config.head == EncoderHead::tokens ? features : pool_tokens(features, visible, pooling);
  return (*classifier)(dropout((*head)(x), config.head_dropout, is_training()));
}

}  // namespace mica::nn
