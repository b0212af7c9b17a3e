#pragma once

#include <array>
#include <cstdint>

#include <mica/nn/containers.h>
#include <mica/nn/embedding.h>
#include <mica/nn/key_value_cache.h>
#include <mica/nn/linear.h>
#include <mica/nn/packed_documents.h>
#include <mica/nn/rms_norm.h>
#include <mica/nn/rotary_embedding.h>

namespace mica::nn {

/// The defaults are Llama 3.2's model of one billion parameters.
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
  bool tied_head = true;     ///< lm_head.weight is model.embed_tokens.weight
  bool qkv_bias = false;     ///< Qwen 2: of q_proj, k_proj and v_proj
  bool output_bias = false;  ///< of o_proj
  bool mlp_bias = false;     ///< of gate_proj, up_proj and down_proj
  bool qk_norm = false;      ///< Qwen 3: normalizes each head's query and key before the rotation
  double dropout = 0;        ///< of the attention weights
  bool checkpoint = false;   ///< keep only the input of each block and compute the rest again in backward
};

/// Self-attention with rotary embeddings and grouped queries, x (B, T, width) to (B, T, width).
class LlamaAttention : public Module {
 public:
  explicit LlamaAttention(const LlamaConfig& config);
  Tensor operator()(const Tensor& x, const CachedLayer& cached = {}) const;
  /// With packed documents: the positions (B, T) of x in its documents, and what AttentionOptions::mask takes. Either
  /// may be undefined.
  Tensor operator()(const Tensor& x, const Tensor& positions, const Tensor& mask) const;
  /// norm(x) to attention's result before o_proj, for T new positions of each sequence: (B · T, width) to (B · T, heads
  /// · head_width).
  Tensor decode(const Tensor& x, const RMSNorm& norm, const CachedLayer& cached) const;

  std::int64_t heads, key_heads, head_width;
  double dropout;
  Linear q_proj, k_proj, v_proj, o_proj;
  RMSNorm q_norm, k_norm;  // registered, with weights, only with qk_norm
  RotaryEmbedding rotary;

 private:
  /// x (B, T, count · head_width) to (B, count, T, head_width), at `positions`, or from `offset` on if these are
  /// undefined.
  Tensor rotated(const Tensor& x, std::int64_t count, const RMSNorm& norm, const Tensor& positions,
                 std::int64_t offset) const;
  Tensor attend(const Tensor& x, const CachedLayer& cached, const Tensor& positions, const Tensor& mask) const;
  bool qk_norm_;
};

/// The feed-forward part of a block: down_proj(silu(gate_proj(x)) · up_proj(x)).
class LlamaMlp : public Module {
 public:
  explicit LlamaMlp(const LlamaConfig& config);
  Tensor operator()(const Tensor& x) const;

  Linear gate_proj, up_proj, down_proj;
};

/// One pre-norm block:
///
///     x ← x + self_attn(input_layernorm(x))
///     x ← x + mlp(post_attention_layernorm(x))
class LlamaBlock : public Module {
 public:
  explicit LlamaBlock(const LlamaConfig& config);
  Tensor operator()(const Tensor& x, const CachedLayer& cached = {}) const;
  /// With packed documents: see LlamaAttention.
  Tensor operator()(const Tensor& x, const Tensor& positions, const Tensor& mask) const;
  /// The same for rows (B · T, width) by the ops of ops/decode: one new position of each sequence, or a prompt's.
  Tensor decode(const Tensor& x, const CachedLayer& cached) const;
  bool can_decode() const;
  bool is_quantized() const;
  /// The block as mica::decoder_step() takes it, without the cache.
  DecoderLayer decoder_layer() const;

  RMSNorm input_layernorm;
  LlamaAttention self_attn;
  RMSNorm post_attention_layernorm;
  LlamaMlp mlp;

 private:
  std::array<const Linear*, 7> linear_layers() const;
  Tensor after_attention(const Tensor& x, const Tensor& attended) const;
};

/// All but the head: tokens (B, T) to features (B, T, width).
class LlamaModel : public Module {
 public:
  explicit LlamaModel(const LlamaConfig& config);
  /// Not with both a cache and packed documents.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr, const PackedDocuments& packed = {}) const;
  /// The same before the last norm.
  Tensor stream(const Tensor& tokens, KeyValueCache* cache = nullptr, const PackedDocuments& packed = {}) const;
  /// Whether a step of one position can be computed by LlamaBlock::decode(): by the cache's and the layers' properties.
  bool can_decode(const KeyValueCache& cache) const;
  /// Whether LlamaBlock::decode() is for `count` new positions: one, or many where a GPU has kernels for them.
  bool decodes(const KeyValueCache& cache, std::int64_t count) const;

  Embedding embed_tokens;
  ModuleList<LlamaBlock> layers;
  RMSNorm norm;
  bool checkpoint;
};

/// A decoder-only transformer in the shape of Llama 2 and 3, Mistral without a window, SmolLM, Qwen 2, 2.5 and 3:
/// pre-norm blocks with RMS norms, rotary embeddings, grouped queries and SwiGLU, and a head that is tied to the token
/// embedding or free.
///
/// Starts with weights that are normal with standard deviation 0.02, biases 0 and norms 1. Parameters are named as in
/// Hugging Face's files: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, …, model.norm.weight,
/// lm_head.weight. See io/pretrained.h for reading and writing these.
///
/// Touvron et al., Llama 2, 2023, arXiv:2307.09288; Dubey et al., The Llama 3 Herd of Models, 2024, arXiv:2407.21783.
class Llama : public Module {
 public:
  explicit Llama(const LlamaConfig& config);

  /// Tokens (B, T), int64 or int32, to logits (B, T, vocab).
  Tensor operator()(const Tensor& tokens) const;
  /// The mean cross entropy of predicting `targets` (B, T), the next tokens, as labels of mica::cross_entropy.
  /// In training mode, the gradient overwrites the logits (in_place), except in float16, where it would
  /// underflow.
  /// With `packed`, documents do not see each other, and each has its own positions (not with dynamic scaling).
  Tensor loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed = {}) const;
  /// The logits of the token after the last one only, (B, vocab).
  Tensor next_token_logits(const Tensor& tokens) const;

  /// An empty cache for `batch` sequences, of the embedding's dtype and device.
  KeyValueCache new_cache(std::int64_t batch = 1, std::int64_t window = 0) const;
  /// The same for tokens (B, T) that go on behind those in the cache, which then has them, too. With dynamic scaling,
  /// keys keep the rotation of the length that the text had when they were computed, as in transformers.
  Tensor operator()(const Tensor& tokens, KeyValueCache& cache) const;
  Tensor next_token_logits(const Tensor& tokens, KeyValueCache& cache) const;
  /// Appends one token to the cache's only text and puts the most likely token after it in its place, -1 if a logit is
  /// NaN or +inf or all are -inf. One kernel, if there is one (mica::decoder_step()); else this returns false and has
  /// done nothing. `token` is one int64 on the model's device. There, a token outside the vocabulary is no Error: the
  /// logits are then NaN. `on_host`: as DecoderStep::tokens_on_host, with cache.length() before.
  bool replace_by_next_token(const Tensor& token, KeyValueCache& cache, std::int64_t* on_host = nullptr) const;

  LlamaConfig config;
  LlamaModel model;
  Linear lm_head;

 private:
  Tensor decode_in_one_kernel(const Tensor& tokens, KeyValueCache& cache, const Tensor& next_token = {},
                              std::int64_t* on_host = nullptr) const;
};

}  // namespace mica::nn
