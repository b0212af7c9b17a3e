#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/nn/containers.h>
#include <mica/nn/embedding.h>
#include <mica/nn/key_value_cache.h>
#include <mica/nn/linear.h>
#include <mica/nn/packed_documents.h>
#include <mica/nn/rms_norm.h>
#include <mica/nn/rotary_embedding.h>

namespace mica::nn {

/// The defaults are those of Llama 3.2 1B.
struct LlamaConfig {
  std::int64_t vocab = 128256;    ///< tokens are 0 … vocab − 1
  std::int64_t context = 131072;  ///< the longest sequence in training; longer ones are computed too
  std::int64_t layers = 16;
  std::int64_t heads = 32;      ///< of the queries
  std::int64_t key_heads = 8;   ///< of keys and values; must divide heads
  std::int64_t head_width = 0;  ///< even; 0: width / heads
  std::int64_t width = 2048;
  std::int64_t hidden = 8192;  ///< inner width of the feed-forward part
  double norm_eps = 1e-5;
  RotaryConfig rotary{.theta = 500000,
                      .scaling = RotaryScaling::llama3,
                      .factor = 32,
                      .original_context = 8192,
                      .low_frequency_factor = 1,
                      .high_frequency_factor = 4};
  std::int64_t window = 0;              ///< each position sees itself and the window − 1 before it; 0: all
  std::vector<bool> windowed_layers{};  ///< false for layers without the window; empty: all have it
  std::vector<bool> rotated_layers{};   ///< SmolLM 3: false for layers without rotary embeddings; empty: all have them
  bool tied_head = true;                ///< lm_head.weight is model.embed_tokens.weight
  bool qkv_bias = false;                ///< Qwen 2: of q_proj, k_proj and v_proj
  bool output_bias = false;             ///< of o_proj
  bool mlp_bias = false;                ///< of gate_proj, up_proj and down_proj
  bool qk_norm = false;                 ///< Qwen 3: normalizes each head's query and key before the rotation
  double dropout = 0;                   ///< of the attention weights
  bool checkpoint = false;              ///< save only the input of each block and recompute the rest in backward
  bool norms_after = false;             ///< OLMo 2: see LlamaBlock
  bool wide_qk_norm = false;            ///< OLMo 2: normalizes the queries, and the keys, of all heads together
  double embedding_scale = 1;           ///< Granite: the embeddings are multiplied by it,
  double residual_scale = 1;            ///< and so is what attention and feed-forward part add to x
  double logit_divisor = 1;             ///< Granite: of the logits
  std::optional<double> attention_scale{};  ///< Granite: AttentionOptions::scale
  /// Phi 3: in files, q_proj, k_proj and v_proj are one tensor, and gate_proj and up_proj another.
  bool fused_files = false;
};

/// Self-attention with rotary embeddings and grouped queries, x (B, T, width) to (B, T, width).
class LlamaAttention : public Module {
 public:
  /// Attention of layer `layer`.
  explicit LlamaAttention(const LlamaConfig& config, std::int64_t layer = 0);
  /// positions (B, T): of each token in its text; undefined: 0, 1, …, or those after the cache's. mask:
  /// AttentionOptions::mask, not together with `cached`. With `cached`, the tokens follow those in the cache, and
  /// attend to these as well.
  Tensor operator()(const Tensor& x, const Tensor& positions = {}, const Tensor& mask = {},
                    const CachedLayer& cached = {}) const;

  std::int64_t heads, key_heads, head_width;
  double dropout;
  Linear q_proj, k_proj, v_proj, o_proj;
  RMSNorm q_norm, k_norm;  // registered, with weights, only with qk_norm or wide_qk_norm
  RotaryEmbedding rotary;
  bool rotates;         // whether queries and keys are rotated
  std::int64_t window;  // 0: none
  std::optional<double> scale;

 private:
  /// Splits x (B, T, count · head_width) into heads: (B, T, count, head_width).
  Tensor by_head(const Tensor& x, std::int64_t count) const;
  Tensor rotated(const Tensor& x, const Tensor& positions, const CachedLayer& cached) const;
  bool qk_norm_, wide_qk_norm_;
};

/// The feed-forward part of a block, x (…, width) to (…, width): down_proj(silu(gate_proj(x)) · up_proj(x)).
class LlamaMlp : public Module {
 public:
  explicit LlamaMlp(const LlamaConfig& config);
  Tensor operator()(const Tensor& x) const;

  Linear gate_proj, up_proj, down_proj;
};

/// One pre-norm block, x (B, T, width) to (B, T, width):
///
///     x ← x + self_attn(input_layernorm(x))
///     x ← x + mlp(post_attention_layernorm(x))
///
/// With norms_after:
///
///     x ← x + post_attention_layernorm(self_attn(x))
///     x ← x + post_feedforward_layernorm(mlp(x))
///
/// With residual_scale, it multiplies what is added to x.
class LlamaBlock : public Module {
 public:
  /// See LlamaAttention.
  explicit LlamaBlock(const LlamaConfig& config, std::int64_t layer = 0);
  Tensor operator()(const Tensor& x, const Tensor& positions = {}, const Tensor& mask = {},
                    const CachedLayer& cached = {}) const;

  RMSNorm input_layernorm;  // without a weight, and not used, with norms_after
  LlamaAttention self_attn;
  RMSNorm post_attention_layernorm;
  LlamaMlp mlp;
  std::optional<RMSNorm> post_feedforward_layernorm;  // with norms_after
  double residual_scale;
};

/// The model without its head: tokens (B, T) to features (B, T, width).
class LlamaModel : public Module {
 public:
  explicit LlamaModel(const LlamaConfig& config);
  /// Throws if both a cache and packed documents are given.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr, const PackedDocuments& packed = {}) const;

  Embedding embed_tokens;
  ModuleList<LlamaBlock> layers;
  RMSNorm norm;
  bool checkpoint;
  double embedding_scale;
};

/// A decoder-only transformer with the architecture of Llama 2 and 3, Mistral, SmolLM, Qwen 2, 2.5 and 3, Phi 3 and 4,
/// Granite and OLMo 2: blocks with RMS norms, rotary embeddings, grouped-query attention and SwiGLU, and a head that
/// may be tied to the token embedding.
///
/// Initialized with normal weights of standard deviation 0.02, biases 0 and norms 1. Parameters are named as in Hugging
/// Face's files: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, …, model.norm.weight,
/// lm_head.weight. See io/pretrained.h for reading and writing these.
///
/// Touvron et al., Llama 2, 2023, arXiv:2307.09288; Dubey et al., The Llama 3 Herd of Models, 2024, arXiv:2407.21783.
class Llama : public Module {
 public:
  explicit Llama(const LlamaConfig& config);  ///< throws unless the sizes fit together

  /// Tokens (B, T), int64 or int32, to logits (B, T, vocab). With a cache, the tokens follow those in it and are
  /// appended to it. With dynamic and longrope scaling, keys in the cache keep the frequencies of the longest text's
  /// length at the time they were computed, as in transformers: see RotaryEmbedding.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  /// The mean cross entropy of predicting `targets` (B, T), the next tokens, as labels of mica::cross_entropy.
  /// If a gradient is needed, forward overwrites the logits with their gradient (in_place), except in float16, where it
  /// would underflow. Backward then runs only once, and there is no second derivative: for these, call
  /// cross_entropy(model(tokens), targets).
  ///
  /// With `packed`, documents do not attend to each other, and each has its own positions. The longest document
  /// determines dynamic and longrope scaling (RotaryEmbedding).
  Tensor loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed = {}) const;
  /// The logits for the token after the last one only: (B, vocab).
  Tensor next_token_logits(const Tensor& tokens, KeyValueCache* cache = nullptr) const;

  /// An empty cache for `batch` sequences, of the embedding's dtype and device. `window`: see KeyValueCache::Config.
  KeyValueCache new_cache(std::int64_t batch = 1, std::int64_t window = 0) const;

  LlamaConfig config;
  LlamaModel model;
  Linear lm_head;

 private:
  Tensor logits(const Tensor& features) const;
};

}  // namespace mica::nn
