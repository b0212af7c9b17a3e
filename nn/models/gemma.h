#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/nn/containers.h>
#include <mica/nn/embedding.h>
#include <mica/nn/key_value_cache.h>
#include <mica/nn/linear.h>
#include <mica/nn/packed_documents.h>
#include <mica/nn/rotary_embedding.h>

namespace mica::nn {

/// The defaults are those of Gemma 2 2B.
struct GemmaConfig {
  std::int64_t vocab = 256000;  ///< tokens are 0 … vocab − 1
  std::int64_t context = 8192;  ///< the longest sequence in training
  std::int64_t window = 4096;   ///< each position of a windowed layer sees itself and the window − 1 before it
  std::vector<bool> windowed_layers{};  ///< empty: every other layer, beginning with the first, as in Gemma 2
  std::int64_t layers = 26;
  std::int64_t heads = 8;         ///< of the queries
  std::int64_t key_heads = 4;     ///< of keys and values; must divide heads
  std::int64_t head_width = 256;  ///< even
  std::int64_t width = 2304;
  std::int64_t hidden = 9216;  ///< inner width of the feed-forward part
  double norm_eps = 1e-6;
  RotaryConfig rotary{};
  std::optional<RotaryConfig> local_rotary{};  ///< Gemma 3: of windowed layers, if it differs
  bool qk_norm = false;                        ///< Gemma 3: normalizes each head's query and key before the rotation
  double query_scale = 256;                    ///< scores are divided by its square root
  double attention_cap = 50;                   ///< of the scores: AttentionOptions::cap; 0: none
  double logit_cap = 30;                       ///< logits are cap · tanh(logits / cap); 0: no cap
  double dropout = 0;                          ///< of the attention weights
  bool checkpoint = false;                     ///< save only the input of each block and recompute the rest in backward
};

/// RMS norm whose factor is 1 + weight; the weight is initialized to 0.
class GemmaNorm : public Module {
 public:
  GemmaNorm(std::int64_t width, double eps);
  Tensor operator()(const Tensor& x) const;

  double eps;
  Tensor weight;
};

/// Self-attention with rotary embeddings, grouped queries and capped scores, x (B, T, width) to (B, T, width).
class GemmaAttention : public Module {
 public:
  /// Attention of layer `layer`.
  explicit GemmaAttention(const GemmaConfig& config, std::int64_t layer = 0);
  /// See LlamaAttention.
  Tensor operator()(const Tensor& x, const Tensor& positions, const Tensor& mask, const CachedLayer& cached = {}) const;

  std::int64_t heads, key_heads, head_width;
  double scale, cap, dropout;
  Linear q_proj, k_proj, v_proj, o_proj;
  std::optional<GemmaNorm> q_norm, k_norm;  // with qk_norm
  std::int64_t window;                      // 0: none
  RotaryEmbedding rotary;

 private:
  Tensor rotated(const Tensor& x, const Tensor& positions, const CachedLayer& cached) const;
};

/// The feed-forward part, x (…, width) to (…, width): down_proj(gelu(gate_proj(x)) · up_proj(x)).
class GemmaMlp : public Module {
 public:
  explicit GemmaMlp(const GemmaConfig& config);
  Tensor operator()(const Tensor& x) const;

  Linear gate_proj, up_proj, down_proj;
};

/// A block with norms before and after each part, x (B, T, width) to (B, T, width):
///
///     x ← x + post_attention_layernorm(self_attn(input_layernorm(x)))
///     x ← x + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x)))
class GemmaBlock : public Module {
 public:
  explicit GemmaBlock(const GemmaConfig& config, std::int64_t layer = 0);
  /// See GemmaAttention.
  Tensor operator()(const Tensor& x, const Tensor& positions, const Tensor& mask, const CachedLayer& cached = {}) const;

  GemmaNorm input_layernorm;
  GemmaAttention self_attn;
  GemmaNorm post_attention_layernorm, pre_feedforward_layernorm;
  GemmaMlp mlp;
  GemmaNorm post_feedforward_layernorm;
};

/// The model without its head: tokens (B, T) to features (B, T, width).
class GemmaModel : public Module {
 public:
  explicit GemmaModel(const GemmaConfig& config);
  /// Throws if both a cache and packed documents are given.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr, const PackedDocuments& packed = {}) const;

  Embedding embed_tokens;
  ModuleList<GemmaBlock> layers;
  GemmaNorm norm;
  bool checkpoint;
};

/// Gemma 2 and 3, decoder-only transformers: four RMS norms in each block, GEGLU, embeddings multiplied by √width, and
/// a head that is tied to them. In some of the layers, attention reaches back only `window` positions. Gemma 2 caps
/// scores and logits; Gemma 3 normalizes queries and keys, and has two rotary embeddings.
///
/// Initialized with normal weights of standard deviation 0.02. Parameters are named as in Hugging Face's files:
/// model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, …, model.norm.weight; state_dict() also has
/// lm_head.weight, which is the embedding. See io/pretrained.h for reading and writing these.
///
/// Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024, arXiv:2408.00118; Gemma 3
/// Technical Report, 2025, arXiv:2503.19786.
class Gemma : public Module {
 public:
  explicit Gemma(const GemmaConfig& config);  ///< throws unless the sizes fit together

  /// Tokens (B, T), int64 or int32, to logits (B, T, vocab). With a cache, the tokens follow those in it and are
  /// appended to it.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  /// The mean cross entropy of predicting `targets` (B, T), as Llama::loss. With `packed`, documents do not attend to
  /// each other, and each has its own positions.
  Tensor loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed = {}) const;
  /// The logits for the token after the last one only: (B, vocab).
  Tensor next_token_logits(const Tensor& tokens, KeyValueCache* cache = nullptr) const;

  /// An empty cache for `batch` sequences, of the embedding's dtype and device. `window`: see KeyValueCache::Config.
  KeyValueCache new_cache(std::int64_t batch = 1, std::int64_t window = 0) const;

  GemmaConfig config;
  GemmaModel model;
  Linear lm_head;

 private:
  Tensor logits(const Tensor& features) const;
};

}  // namespace mica::nn
