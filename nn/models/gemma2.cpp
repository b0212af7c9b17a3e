#include <algorithm>
#include <cmath>

#include <mica/core/creation.h>
#include <mica/nn/detail/block_pass.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/gemma2.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const Gemma2Config& checked_gemma2(const Gemma2Config& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1 && c.window >= 1 && c.layers >= 0 &&
            c.layers <= detail::kMostLayers,
        "Gemma2: expected vocab, width, hidden and window of at least 1 and 0 to {} layers, got {}, {}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.width, c.hidden, c.window, c.layers);
  check(c.heads >= 1 && c.key_heads >= 1 && c.heads % c.key_heads == 0,
        "Gemma2: expected key_heads to divide heads, got {} and {}", c.key_heads, c.heads);
  check(c.head_width >= 1 && c.head_width <= INT64_MAX / c.heads, "Gemma2: expected heads of at least 1 column, got {}",
        c.head_width);
  check(c.query_scale > 0 && c.attention_cap >= 0 && c.logit_cap >= 0,
        "Gemma2: expected query_scale > 0 and caps >= 0, got {}, {} and {}", c.query_scale, c.attention_cap,
        c.logit_cap);
  return c;
}

// √width, rounded to the embedding's dtype, as in Google's training.
double embedding_scale(const Tensor& embedding) {
  return full({}, std::sqrt(static_cast<double>(embedding.size(1))), embedding.dtype()).item();
}

}  // namespace

Gemma2Norm::Gemma2Norm(const Gemma2Config& c) : eps(c.norm_eps), weight(param("weight", zeros({c.width}))) {
  check(eps >= 0, "Gemma2: expected norm_eps >= 0, got {}", eps);
}

Tensor Gemma2Norm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    // In 16 bits, 1 + weight would lose most of a small weight.
    const DType dtype = weight.dtype() == float64 ? float64 : float32;
    return rms_norm(x, weight.shape(), weight.to(dtype) + 1.0, eps);
  });
}

Gemma2Attention::Gemma2Attention(const Gemma2Config& c)
    : heads(checked_gemma2(c).heads),
      key_heads(c.key_heads),
      head_width(c.head_width),
      scale(1 / std::sqrt(c.query_scale)),
      cap(c.attention_cap),
      dropout(c.dropout),
      q_proj(child("q_proj", Linear{c.width, heads * head_width, {.bias = false}})),
      k_proj(child("k_proj", Linear{c.width, key_heads * head_width, {.bias = false}})),
      v_proj(child("v_proj", Linear{c.width, key_heads * head_width, {.bias = false}})),
      o_proj(child("o_proj", Linear{heads * head_width, c.width, {.bias = false}})),
      rotary(child("rotary", RotaryEmbedding{head_width, c.rotary})) {}

Tensor Gemma2Attention::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                                   const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    check(x.dim() == 3 && x.size(2) == q_proj.in_features(), "Gemma2Attention: expected (B, T, {}), got {}",
          q_proj.in_features(), x.shape());
    const auto by_head = [&](const Tensor& y, std::int64_t count) {
      return reshape(y, {x.size(0), x.size(1), count, head_width});
    };
    const Tensor q =
        transpose(rotated(by_head(q_proj(x), heads), positions, cached), 1, 2);  // (B, heads, T, head_width)
    const Tensor k = transpose(rotated(by_head(k_proj(x), key_heads), positions, cached), 1, 2);
    const Tensor v = transpose(by_head(v_proj(x), key_heads), 1, 2);
    if (cached) {
      check(!mask.defined(), "Gemma2Attention: a cache is for attention without a mask");
      return o_proj(cached.cache->attend(cached.layer, q, k, v));
    }
    const Tensor y = scaled_dot_product_attention(
        q, k, v, {.causal = true, .scale = scale, .cap = cap, .dropout = is_training() ? dropout : 0, .mask = mask});
    return o_proj(reshape(transpose(y, 1, 2), {x.size(0), x.size(1), heads * head_width}));
  });
}

Tensor Gemma2Attention::rotated(const Tensor& x, const Tensor& positions, const CachedLayer& cached) const {
  if (!positions.defined()) {
    return rotary(x, cached ? cached.cache->length() : 0);
  }
  return rotary(x, positions, cached ? cached.cache->longest() : 0);
}

Gemma2Mlp::Gemma2Mlp(const Gemma2Config& c)
    : gate_proj(child("gate_proj", Linear{c.width, c.hidden, {.bias = false}})),
      up_proj(child("up_proj", Linear{c.width, c.hidden, {.bias = false}})),
      down_proj(child("down_proj", Linear{c.hidden, c.width, {.bias = false}})) {}

Tensor Gemma2Mlp::operator()(const Tensor& x) const {
  return call(*this, x,
              [&](const Tensor& x) { return down_proj(geglu(gate_proj(x), up_proj(x), GeluApproximation::tanh)); });
}

Gemma2Block::Gemma2Block(const Gemma2Config& c)
    : input_layernorm(child("input_layernorm", Gemma2Norm{c})),
      self_attn(child("self_attn", Gemma2Attention{c})),
      post_attention_layernorm(child("post_attention_layernorm", Gemma2Norm{c})),
      pre_feedforward_layernorm(child("pre_feedforward_layernorm", Gemma2Norm{c})),
      mlp(child("mlp", Gemma2Mlp{c})),
      post_feedforward_layernorm(child("post_feedforward_layernorm", Gemma2Norm{c})) {}

Tensor Gemma2Block::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                               const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    const Tensor y = x + post_attention_layernorm(self_attn(input_layernorm(x), positions, mask, cached));
    return y + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(y)));
  });
}

Gemma2Model::Gemma2Model(const Gemma2Config& c)
    : embed_tokens(child("embed_tokens", Embedding{checked_gemma2(c).vocab, c.width})),
      layers(child("layers", ModuleList<Gemma2Block>{})),
      norm(child("norm", Gemma2Norm{c})),
      window(c.window),
      checkpoint(c.checkpoint) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layers.push_back(Gemma2Block{c});
  }
}

Tensor Gemma2Model::operator()(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  return call(*this, tokens, [&](const Tensor& tokens) {
    check(tokens.dim() == 2, "Gemma2: expected tokens of shape (B, T), got {}", tokens.shape());
    packed.check_shapes("Gemma2", tokens);
    detail::BlockPass pass("Gemma2", tokens, cache, packed, static_cast<std::int64_t>(layers.size()), checkpoint);
    std::int64_t reach = tokens.size(1);  // the most positions that one may see
    if (cache != nullptr) {
      const std::int64_t limit = cache->config().window;
      reach = limit == 0 ? cache->longest() : std::min(cache->longest(), limit);
    }
    check(reach <= window,
          "Gemma2: {} positions are more than the window of {}, and mica has no attention in windows yet", reach,
          window);
    Tensor x = embed_tokens(tokens) * embedding_scale(embed_tokens.weight);
    for (const Gemma2Block& block : layers) {
      x = pass(block, x, pass.positions(), pass.mask());
    }
    pass.end();
    return norm(x);
  });
}

Gemma2::Gemma2(const Gemma2Config& config)
    : config(config),
      model(child("model", Gemma2Model{config})),
      lm_head(child("lm_head", Linear{model.embed_tokens.weight})) {
  for (const Tensor& parameter : parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, 0.02);
    }
  }
}

Tensor Gemma2::logits(const Tensor& features) const {
  const Tensor y = lm_head(features);
  return config.logit_cap == 0 ? y : tanh(y / config.logit_cap) * config.logit_cap;
}

Tensor Gemma2::operator()(const Tensor& tokens, KeyValueCache* cache) const {
  return call(*this, tokens, [&](const Tensor& tokens) { return logits(model(tokens, cache)); });
}

Tensor Gemma2::loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed) const {
  const Scope scope(*this);
  const Tensor y = logits(model(tokens, nullptr, packed));
  return cross_entropy(y, targets, {.in_place = y.dtype() != float16});
}

Tensor Gemma2::next_token_logits(const Tensor& tokens, KeyValueCache* cache) const {
  const Scope scope(*this);
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "Gemma2: expected at least one token to continue, got shape {}",
        tokens.shape());
  return logits(select(model(tokens, cache), 1, -1));
}

KeyValueCache Gemma2::new_cache(std::int64_t batch, std::int64_t window) const {
  const Tensor& weight = model.embed_tokens.weight;
  return KeyValueCache({.layers = config.layers,
                        .batch = batch,
                        .key_heads = config.key_heads,
                        .head_width = config.head_width,
                        .dtype = weight.dtype(),
                        .device = weight.device(),
                        .scale = 1 / std::sqrt(config.query_scale),
                        .cap = config.attention_cap,
                        .window = window});
}

}  // namespace mica::nn
