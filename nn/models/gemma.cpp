#include <algorithm>
#include <cmath>

#include <mica/core/creation.h>
#include <mica/nn/detail/block_pass.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/gemma.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const GemmaConfig& checked_gemma(const GemmaConfig& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1 && c.window >= 1 && c.layers >= 0 &&
            c.layers <= detail::kMostLayers,
        "Gemma: expected vocab, width, hidden and window of at least 1 and 0 to {} layers, got {}, {}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.width, c.hidden, c.window, c.layers);
  check(c.heads >= 1 && c.key_heads >= 1 && c.heads % c.key_heads == 0,
        "Gemma: expected key_heads to divide heads, got {} and {}", c.key_heads, c.heads);
  check(c.head_width >= 1 && c.head_width <= INT64_MAX / c.heads, "Gemma: expected heads of at least 1 column, got {}",
        c.head_width);
  check(c.windowed_layers.empty() || static_cast<std::int64_t>(c.windowed_layers.size()) == c.layers,
        "Gemma: expected windowed_layers to be empty or to have {} elements, got {}", c.layers,
        c.windowed_layers.size());
  check(c.query_scale > 0 && c.attention_cap >= 0 && c.logit_cap >= 0,
        "Gemma: expected query_scale > 0 and caps >= 0, got {}, {} and {}", c.query_scale, c.attention_cap,
        c.logit_cap);
  return c;
}

std::int64_t window_in(const GemmaConfig& c, std::int64_t layer) {
  const bool has = c.windowed_layers.empty() ? layer % 2 == 0 : c.windowed_layers[static_cast<std::size_t>(layer)];
  return has ? c.window : 0;
}

// √width, rounded to the embedding's dtype, as in Google's training.
double embedding_scale(const Tensor& embedding) {
  return full({}, std::sqrt(static_cast<double>(embedding.size(1))), embedding.dtype()).item();
}

}  // namespace

GemmaNorm::GemmaNorm(std::int64_t width, double eps) : eps(eps), weight(param("weight", zeros({width}))) {
  check(eps >= 0, "Gemma: expected norm_eps >= 0, got {}", eps);
}

Tensor GemmaNorm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    // In 16 bits, 1 + weight would lose most of a small weight.
    const DType dtype = weight.dtype() == float64 ? float64 : float32;
    return rms_norm(x, weight.shape(), weight.to(dtype) + 1.0, eps);
  });
}

GemmaAttention::GemmaAttention(const GemmaConfig& c, std::int64_t layer)
    : heads(checked_gemma(c).heads),
      key_heads(c.key_heads),
      head_width(c.head_width),
      scale(1 / std::sqrt(c.query_scale)),
      cap(c.attention_cap),
      dropout(c.dropout),
      q_proj(child("q_proj", Linear{c.width, heads * head_width, {.bias = false}})),
      k_proj(child("k_proj", Linear{c.width, key_heads * head_width, {.bias = false}})),
      v_proj(child("v_proj", Linear{c.width, key_heads * head_width, {.bias = false}})),
      o_proj(child("o_proj", Linear{heads * head_width, c.width, {.bias = false}})),
      window(window_in(c, layer)),
      rotary(child("rotary", RotaryEmbedding{head_width, window > 0 ? c.local_rotary.value_or(c.rotary) : c.rotary})) {
  if (c.qk_norm) {
    q_norm.emplace(child("q_norm", GemmaNorm{head_width, c.norm_eps}));
    k_norm.emplace(child("k_norm", GemmaNorm{head_width, c.norm_eps}));
  }
}

Tensor GemmaAttention::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                                  const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    check(x.dim() == 3 && x.size(2) == q_proj.in_features(), "GemmaAttention: expected (B, T, {}), got {}",
          q_proj.in_features(), x.shape());
    const auto by_head = [&](const Tensor& y, std::int64_t count) {
      return reshape(y, {x.size(0), x.size(1), count, head_width});
    };
    const auto normed = [](const std::optional<GemmaNorm>& norm, const Tensor& y) { return norm ? (*norm)(y) : y; };
    const Tensor queries = normed(q_norm, by_head(q_proj(x), heads));
    const Tensor keys = normed(k_norm, by_head(k_proj(x), key_heads));
    const Tensor q = transpose(rotated(queries, positions, cached), 1, 2);  // (B, heads, T, head_width)
    const Tensor k = transpose(rotated(keys, positions, cached), 1, 2);
    const Tensor v = transpose(by_head(v_proj(x), key_heads), 1, 2);
    if (cached) {
      check(!mask.defined(), "GemmaAttention: a cache is for attention without a mask");
      return o_proj(cached.cache->attend(cached.layer, q, k, v));
    }
    const Tensor y = scaled_dot_product_attention(q, k, v,
                                                  {.causal = true,
                                                   .window = window,
                                                   .scale = scale,
                                                   .cap = cap,
                                                   .dropout = is_training() ? dropout : 0,
                                                   .mask = mask});
    return o_proj(reshape(transpose(y, 1, 2), {x.size(0), x.size(1), heads * head_width}));
  });
}

Tensor GemmaAttention::rotated(const Tensor& x, const Tensor& positions, const CachedLayer& cached) const {
  if (!positions.defined()) {
    return rotary(x, cached ? cached.cache->length() : 0);
  }
  return rotary(x, positions, cached ? cached.cache->longest() : 0);
}

GemmaMlp::GemmaMlp(const GemmaConfig& c)
    : gate_proj(child("gate_proj", Linear{c.width, c.hidden, {.bias = false}})),
      up_proj(child("up_proj", Linear{c.width, c.hidden, {.bias = false}})),
      down_proj(child("down_proj", Linear{c.hidden, c.width, {.bias = false}})) {}

Tensor GemmaMlp::operator()(const Tensor& x) const {
  return call(*this, x,
              [&](const Tensor& x) { return down_proj(geglu(gate_proj(x), up_proj(x), GeluApproximation::tanh)); });
}

GemmaBlock::GemmaBlock(const GemmaConfig& c, std::int64_t layer)
    : input_layernorm(child("input_layernorm", GemmaNorm{c.width, c.norm_eps})),
      self_attn(child("self_attn", GemmaAttention{c, layer})),
      post_attention_layernorm(child("post_attention_layernorm", GemmaNorm{c.width, c.norm_eps})),
      pre_feedforward_layernorm(child("pre_feedforward_layernorm", GemmaNorm{c.width, c.norm_eps})),
      mlp(child("mlp", GemmaMlp{c})),
      post_feedforward_layernorm(child("post_feedforward_layernorm", GemmaNorm{c.width, c.norm_eps})) {}

Tensor GemmaBlock::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                              const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    const Tensor y = x + post_attention_layernorm(self_attn(input_layernorm(x), positions, mask, cached));
    return y + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(y)));
  });
}

GemmaModel::GemmaModel(const GemmaConfig& c)
    : embed_tokens(child("embed_tokens", Embedding{checked_gemma(c).vocab, c.width})),
      layers(child("layers", ModuleList<GemmaBlock>{})),
      norm(child("norm", GemmaNorm{c.width, c.norm_eps})),
      checkpoint(c.checkpoint) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layers.push_back(GemmaBlock{c, i});
  }
}

Tensor GemmaModel::operator()(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  return call(*this, tokens, [&](const Tensor& tokens) {
    check(tokens.dim() == 2, "Gemma: expected tokens of shape (B, T), got {}", tokens.shape());
    packed.check_shapes("Gemma", tokens);
    detail::BlockPass pass("Gemma", tokens, cache, packed, static_cast<std::int64_t>(layers.size()), checkpoint);
    Tensor x = embed_tokens(tokens) * embedding_scale(embed_tokens.weight);
    for (const GemmaBlock& block : layers) {
      x = pass(block, x, pass.positions(), pass.mask());
    }
    pass.end();
    return norm(x);
  });
}

Gemma::Gemma(const GemmaConfig& config)
    : config(config),
      model(child("model", GemmaModel{config})),
      lm_head(child("lm_head", Linear{model.embed_tokens.weight})) {
  for (const Tensor& parameter : parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, 0.02);
    }
  }
}

Tensor Gemma::logits(const Tensor& features) const {
  const Tensor y = lm_head(features);
  return config.logit_cap == 0 ? y : tanh(y / config.logit_cap) * config.logit_cap;
}

Tensor Gemma::operator()(const Tensor& tokens, KeyValueCache* cache) const {
  return call(*this, tokens, [&](const Tensor& tokens) { return logits(model(tokens, cache)); });
}

Tensor Gemma::loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed) const {
  const Scope scope(*this);
  const Tensor y = logits(model(tokens, nullptr, packed));
  return cross_entropy(y, targets, {.in_place = y.dtype() != float16});
}

Tensor Gemma::next_token_logits(const Tensor& tokens, KeyValueCache* cache) const {
  const Scope scope(*this);
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "Gemma: expected at least one token to continue, got shape {}",
        tokens.shape());
  return logits(select(model(tokens, cache), 1, -1));
}

KeyValueCache Gemma::new_cache(std::int64_t batch, std::int64_t window) const {
  const Tensor& weight = model.embed_tokens.weight;
  return KeyValueCache({.layers = config.layers,
                        .batch = batch,
                        .key_heads = config.key_heads,
                        .head_width = config.head_width,
                        .dtype = weight.dtype(),
                        .device = weight.device(),
                        .scale = 1 / std::sqrt(config.query_scale),
                        .cap = config.attention_cap,
                        .window = window,
                        .windows = detail::windows_of(model.layers)});
}

}  // namespace mica::nn
