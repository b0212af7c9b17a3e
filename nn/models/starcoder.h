#pragma once

#include <cstdint>

#include <mica/nn/containers.h>
#include <mica/nn/embedding.h>
#include <mica/nn/models/llama.h>
#include <mica/nn/transformer.h>

namespace mica::nn {

/// The defaults are those of StarCoder 2 3B.
struct StarcoderConfig {
  std::int64_t vocab = 49152;    ///< tokens are 0 … vocab − 1
  std::int64_t context = 16384;  ///< the longest sequence in training; longer ones are computed too
  std::int64_t layers = 30;
  std::int64_t heads = 24;      ///< of the queries
  std::int64_t key_heads = 2;   ///< of keys and values; must divide heads
  std::int64_t head_width = 0;  ///< even; 0: width / heads
  std::int64_t width = 3072;
  std::int64_t hidden = 12288;  ///< inner width of the feed-forward part
  double norm_eps = 1e-5;
  RotaryConfig rotary{.theta = 999999.4420358813};
  std::int64_t window = 4096;    ///< each position sees itself and the window − 1 before it; 0: all
  bool bias = true;              ///< of the linear layers in the blocks; norms always have biases
  bool tied_head = true;         ///< lm_head.weight is model.embed_tokens.weight
  double dropout = 0;            ///< of what attention and feed-forward part add to x
  double attention_dropout = 0;  ///< of the attention weights
  double embedding_dropout = 0;
  bool checkpoint = false;  ///< save only the input of each block and recompute the rest in backward
};

/// One pre-norm block, x (B, T, width) to (B, T, width):
///
///     x ← x + dropout(self_attn(input_layernorm(x)))
///     x ← x + mlp(post_attention_layernorm(x))
class StarcoderBlock : public Module {
 public:
  explicit StarcoderBlock(const StarcoderConfig& config);
  /// See LlamaAttention.
  Tensor operator()(const Tensor& x, const Tensor& positions = {}, const Tensor& mask = {},
                    const CachedLayer& cached = {}) const;

  LayerNorm input_layernorm;
  LlamaAttention self_attn;
  Dropout dropout;
  LayerNorm post_attention_layernorm;
  Mlp mlp;
};

/// The model without its head: tokens (B, T) to features (B, T, width).
class StarcoderModel : public Module {
 public:
  explicit StarcoderModel(const StarcoderConfig& config);
  /// Throws if both a cache and packed documents are given.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr, const PackedDocuments& packed = {}) const;

  Embedding embed_tokens;
  Dropout dropout;
  ModuleList<StarcoderBlock> layers;
  LayerNorm norm;
  bool checkpoint;
};

/// StarCoder 2, a decoder-only transformer: Llama's attention, in a window, between GPT-2's layer norms and
/// feed-forward part, with biases, and a head that may be tied to the token embedding.
///
/// Initialized with normal weights of standard deviation 0.02, biases 0 and norms 1. Parameters are named as in Hugging
/// Face's files: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.mlp.c_fc.weight, …,
/// model.norm.weight, lm_head.weight. See io/pretrained.h for reading and writing these.
///
/// Lozhkov et al., StarCoder 2 and The Stack v2, 2024, arXiv:2402.19173.
class Starcoder : public Module {
 public:
  explicit Starcoder(const StarcoderConfig& config);  ///< throws unless the sizes fit together

  /// See Llama for all of these.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  Tensor loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed = {}) const;
  Tensor next_token_logits(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  KeyValueCache new_cache(std::int64_t batch = 1, std::int64_t window = 0) const;

  StarcoderConfig config;
  StarcoderModel model;
  Linear lm_head;
};

}  // namespace mica::nn
