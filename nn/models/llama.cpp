#include <mica/nn/detail/block_pass.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/init.h>
#include <mica/nn/models/llama.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/cross_entropy/cross_entropy.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

std::int64_t head_width_of(const LlamaConfig& c) { return c.head_width > 0 ? c.head_width : c.width / c.heads; }

const LlamaConfig& checked(const LlamaConfig& c) {
  check(c.vocab >= 1 && c.width >= 1 && c.hidden >= 1 && c.layers >= 0 && c.layers <= detail::kMostLayers,
        "Llama: expected vocab, width and hidden of at least 1 and 0 to {} layers, got {}, {}, {} and {}",
        detail::kMostLayers, c.vocab, c.width, c.hidden, c.layers);
  check(c.heads >= 1 && c.key_heads >= 1 && c.heads % c.key_heads == 0,
        "Llama: expected key_heads to divide heads, got {} and {}", c.key_heads, c.heads);
  check(c.head_width > 0 || (c.head_width == 0 && c.width % c.heads == 0),
        "Llama: expected a head_width, or heads to divide width, got head_width {}, heads {} and width {}",
        c.head_width, c.heads, c.width);
  check(c.rotated_layers.empty() || static_cast<std::int64_t>(c.rotated_layers.size()) == c.layers,
        "Llama: expected rotated_layers to be empty or to have {} elements, got {}", c.layers, c.rotated_layers.size());
  check(c.window >= 0, "Llama: expected a window of at least 1, or 0 for none, got {}", c.window);
  check(c.windowed_layers.empty() || static_cast<std::int64_t>(c.windowed_layers.size()) == c.layers,
        "Llama: expected windowed_layers to be empty or to have {} elements, got {}", c.layers,
        c.windowed_layers.size());
  check(!c.qk_norm || !c.wide_qk_norm, "Llama: expected qk_norm or wide_qk_norm, not both");
  // Written so that NaN fails.
  check(c.embedding_scale > 0 && c.residual_scale > 0 && c.logit_divisor > 0 && c.attention_scale.value_or(1) > 0,
        "Llama: expected scales above 0, got {} of embeddings, {} of residuals, {} of attention and the divisor {}",
        c.embedding_scale, c.residual_scale, c.attention_scale.value_or(1), c.logit_divisor);
  check(head_width_of(c) <= INT64_MAX / c.heads, "Llama: {} heads of width {} are too many", c.heads, head_width_of(c));
  return c;
}

bool rotates_in(const LlamaConfig& c, std::int64_t layer) {
  return c.rotated_layers.empty() || c.rotated_layers[static_cast<std::size_t>(layer)];
}

std::int64_t window_in(const LlamaConfig& c, std::int64_t layer) {
  return c.windowed_layers.empty() || c.windowed_layers[static_cast<std::size_t>(layer)] ? c.window : 0;
}

RMSNorm head_norm(const LlamaConfig& c, std::int64_t heads) {
  return RMSNorm{head_width_of(c) * (c.wide_qk_norm ? heads : 1),
                 {.eps = c.norm_eps, .elementwise_affine = c.qk_norm || c.wide_qk_norm}};
}

Tensor scaled(const Tensor& x, double scale) { return scale == 1 ? x : x * scale; }

}  // namespace

LlamaAttention::LlamaAttention(const LlamaConfig& c, std::int64_t layer)
    : heads(checked(c).heads),
      key_heads(c.key_heads),
      head_width(head_width_of(c)),
      dropout(c.dropout),
      q_proj(child("q_proj", Linear{c.width, heads * head_width, {.bias = c.qkv_bias}})),
      k_proj(child("k_proj", Linear{c.width, key_heads * head_width, {.bias = c.qkv_bias}})),
      v_proj(child("v_proj", Linear{c.width, key_heads * head_width, {.bias = c.qkv_bias}})),
      o_proj(child("o_proj", Linear{heads * head_width, c.width, {.bias = c.output_bias}})),
      q_norm(child("q_norm", head_norm(c, heads))),
      k_norm(child("k_norm", head_norm(c, key_heads))),
      rotary(child("rotary", RotaryEmbedding{head_width, c.rotary})),
      rotates(rotates_in(c, layer)),
      window(window_in(c, layer)),
      scale(c.attention_scale),
      qk_norm_(c.qk_norm),
      wide_qk_norm_(c.wide_qk_norm) {}

Tensor LlamaAttention::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                                  const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    check(x.dim() == 3 && x.size(2) == q_proj.in_features(), "LlamaAttention: expected (B, T, {}), got {}",
          q_proj.in_features(), x.shape());
    Tensor q = q_proj(x), k = k_proj(x);
    if (wide_qk_norm_) {
      q = q_norm(q);
      k = k_norm(k);
    }
    q = by_head(q, heads);
    k = by_head(k, key_heads);
    if (qk_norm_) {
      q = q_norm(q);
      k = k_norm(k);
    }
    if (rotates) {
      q = rotated(q, positions, cached);
      k = rotated(k, positions, cached);
    }
    q = transpose(q, 1, 2);  // (B, heads, T, head_width)
    k = transpose(k, 1, 2);
    const Tensor v = transpose(by_head(v_proj(x), key_heads), 1, 2);
    if (cached) {
      check(!mask.defined(), "LlamaAttention: a cache is for attention without a mask");
      return o_proj(cached.cache->attend(cached.layer, q, k, v));
    }
    const Tensor y = scaled_dot_product_attention(
        q, k, v,
        {.causal = true, .window = window, .scale = scale, .dropout = is_training() ? dropout : 0, .mask = mask});
    return o_proj(reshape(transpose(y, 1, 2), {x.size(0), x.size(1), heads * head_width}));
  });
}

Tensor LlamaAttention::by_head(const Tensor& x, std::int64_t count) const {
  return reshape(x, {x.size(0), x.size(1), count, head_width});
}

Tensor LlamaAttention::rotated(const Tensor& x, const Tensor& positions, const CachedLayer& cached) const {
  if (!positions.defined()) {
    return rotary(x, cached ? cached.cache->length() : 0);
  }
  const bool by_length = cached && depends_on_length(rotary.config.scaling);
  return rotary(x, positions, by_length ? cached.cache->longest() : 0);
}

LlamaMlp::LlamaMlp(const LlamaConfig& c)
    : gate_proj(child("gate_proj", Linear{c.width, c.hidden, {.bias = c.mlp_bias}})),
      up_proj(child("up_proj", Linear{c.width, c.hidden, {.bias = c.mlp_bias}})),
      down_proj(child("down_proj", Linear{c.hidden, c.width, {.bias = c.mlp_bias}})) {}

Tensor LlamaMlp::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return down_proj(swiglu(gate_proj(x), up_proj(x))); });
}

LlamaBlock::LlamaBlock(const LlamaConfig& c, std::int64_t layer)
    : input_layernorm(
          child("input_layernorm", RMSNorm{c.width, {.eps = c.norm_eps, .elementwise_affine = !c.norms_after}})),
      self_attn(child("self_attn", LlamaAttention{c, layer})),
      post_attention_layernorm(child("post_attention_layernorm", RMSNorm{c.width, {.eps = c.norm_eps}})),
      mlp(child("mlp", LlamaMlp{c})),
      residual_scale(c.residual_scale) {
  if (c.norms_after) {
    post_feedforward_layernorm.emplace(child("post_feedforward_layernorm", RMSNorm{c.width, {.eps = c.norm_eps}}));
  }
}

Tensor LlamaBlock::operator()(const Tensor& x, const Tensor& positions, const Tensor& mask,
                              const CachedLayer& cached) const {
  return call(*this, x, positions, mask, [&](const Tensor& x, const Tensor& positions, const Tensor& mask) {
    if (post_feedforward_layernorm) {
      const Tensor sum = x + scaled(post_attention_layernorm(self_attn(x, positions, mask, cached)), residual_scale);
      return sum + scaled((*post_feedforward_layernorm)(mlp(sum)), residual_scale);
    }
    const Tensor added = scaled(self_attn(input_layernorm(x), positions, mask, cached), residual_scale);
    const auto [sum, y] = post_attention_layernorm(added, x);
    return sum + scaled(mlp(y), residual_scale);
  });
}

LlamaModel::LlamaModel(const LlamaConfig& c)
    : embed_tokens(child("embed_tokens", Embedding{checked(c).vocab, c.width})),
      layers(child("layers", ModuleList<LlamaBlock>{})),
      norm(child("norm", RMSNorm{c.width, {.eps = c.norm_eps}})),
      checkpoint(c.checkpoint),
      embedding_scale(c.embedding_scale) {
  for (std::int64_t i = 0; i < c.layers; ++i) {
    layers.push_back(LlamaBlock{c, i});
  }
}

Tensor LlamaModel::operator()(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed) const {
  return call(*this, tokens, [&](const Tensor& tokens) {
    check(tokens.dim() == 2, "Llama: expected tokens of shape (B, T), got {}", tokens.shape());
    packed.check_shapes("Llama", tokens);
    detail::BlockPass pass("Llama", tokens, cache, packed, static_cast<std::int64_t>(layers.size()), checkpoint);
    Tensor x = scaled(embed_tokens(tokens), embedding_scale);
    for (const LlamaBlock& block : layers) {
      x = pass(block, x, pass.positions(), pass.mask());
    }
    pass.end();
    return norm(x);
  });
}

Llama::Llama(const LlamaConfig& config)
    : config(config),
      model(child("model", LlamaModel{config})),
      lm_head(child("lm_head", config.tied_head ? Linear{model.embed_tokens.weight}
                                                : Linear{config.width, config.vocab, {.bias = false}})) {
  for (const auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() == 2) {
      init::normal_(parameter, 0, 0.02);
    } else if (name.ends_with(".bias")) {
      init::constant_(parameter, 0);
    }
  }
}

Tensor Llama::logits(const Tensor& features) const {
  const Tensor y = lm_head(features);
  return config.logit_divisor == 1 ? y : y / config.logit_divisor;
}

Tensor Llama::operator()(const Tensor& tokens, KeyValueCache* cache) const {
  return call(*this, tokens, [&](const Tensor& tokens) { return logits(model(tokens, cache)); });
}

Tensor Llama::loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed) const {
  const Scope scope(*this);
  const Tensor y = logits(model(tokens, nullptr, packed));
  return cross_entropy(y, targets, {.in_place = y.dtype() != float16});
}

Tensor Llama::next_token_logits(const Tensor& tokens, KeyValueCache* cache) const {
  const Scope scope(*this);
  check(tokens.dim() == 2 && tokens.size(1) >= 1, "Llama: expected at least one token to continue, got shape {}",
        tokens.shape());
  return logits(select(model(tokens, cache), 1, -1));
}

KeyValueCache Llama::new_cache(std::int64_t batch, std::int64_t window) const {
  const Tensor& weight = model.embed_tokens.weight;
  return KeyValueCache({.layers = config.layers,
                        .batch = batch,
                        .key_heads = config.key_heads,
                        .head_width = head_width_of(config),
                        .dtype = weight.dtype(),
                        .device = weight.device(),
                        .scale = config.attention_scale,
                        .window = window,
                        .windows = detail::windows_of(model.layers)});
}

}  // namespace mica::nn
