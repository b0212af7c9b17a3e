#pragma once

#include <optional>
#include <string_view>

#include <mica/nn/containers.h>
#include <mica/nn/embedding.h>
#include <mica/nn/packed_documents.h>
#include <mica/nn/transformer.h>

namespace mica::nn {

/// The defaults are GPT-2's small model.
struct GPTConfig {
  std::int64_t vocab = 50257;   ///< tokens are 0 … vocab − 1
  std::int64_t context = 1024;  ///< the longest sequence
  std::int64_t layers = 12;
  std::int64_t heads = 12;  ///< must divide width
  std::int64_t width = 768;
  double dropout = 0;
  bool bias = true;  ///< of the linear layers and the norms
  GeluApproximation gelu = GeluApproximation::tanh;
  bool checkpoint = false;  ///< save only the input of each block and recompute the rest in backward: the same
                            ///< bits, more time, less memory (see nn::checkpoint); may be changed at any time
  double norm_eps = 1e-5;
  std::optional<double> attention_dropout{};  ///< of the attention weights, if it differs from `dropout`
  std::optional<double> embedding_dropout{};  ///< of the embeddings, if it differs from `dropout`
  /// The name of the tanh approximation in config.json: "gelu_pytorch_tanh" instead of "gelu_new". In transformers, the
  /// two differ by rounding; in mica, they do not differ.
  bool gelu_pytorch_tanh = false;
};

/// GPT-2's four sizes, by their number of parameters: "124m", "350m", "774m" and "1558m". The vocabulary is padded to
/// 50304, a multiple of 128, which makes products faster; the last 47 tokens never occur in text.
GPTConfig gpt2_config(std::string_view size);

/// A decoder-only transformer (Radford et al., 2019): token and position embeddings, pre-norm blocks, a last norm,
/// and a head that shares its weight with the token embedding.
///
/// Initialized as GPT-2: weights normal with standard deviation 0.02, the last weights of residual branches (c_proj)
/// with 0.02 / √(2 · layers), biases 0, the norms' weights 1. Parameters have GPT-2's names: wte.weight, wpe.weight,
/// h.0.ln_1.weight, h.0.attn.c_attn.weight, …, ln_f.weight; state_dict() also has lm_head.weight, which is wte.weight.
class GPT : public Module {
 public:
  explicit GPT(const GPTConfig& config);  ///< throws unless the sizes fit together

  /// Tokens (B, T), int64 or int32, to logits (B, T, vocab). With a cache, the tokens follow those in it and are
  /// appended to it. The whole text must not exceed the context.
  Tensor operator()(const Tensor& tokens, KeyValueCache* cache = nullptr) const;
  /// The mean cross entropy of predicting `targets` (B, T), the next tokens, as labels of mica::cross_entropy.
  /// If a gradient is needed, forward overwrites the logits with their gradient (in_place), except in float16, where it
  /// would underflow. Backward then runs only once, and there is no second derivative: for these, call
  /// cross_entropy(model(tokens), targets).
  ///
  /// With `packed`, documents do not attend to each other, and each has its own positions.
  Tensor loss(const Tensor& tokens, const Tensor& targets, const PackedDocuments& packed = {}) const;
  /// The logits for the token after the last one only: (B, vocab).
  Tensor next_token_logits(const Tensor& tokens, KeyValueCache* cache = nullptr) const;

  /// An empty cache for `batch` sequences, of the embedding's dtype and device. `window`: see KeyValueCache::Config.
  KeyValueCache new_cache(std::int64_t batch = 1, std::int64_t window = 0) const;

  GPTConfig config;
  Embedding wte;
  Embedding wpe;
  Dropout drop;
  ModuleList<TransformerBlock> h;
  LayerNorm ln_f;
  Linear lm_head;

 private:
  Tensor features(const Tensor& tokens, KeyValueCache* cache, const PackedDocuments& packed = {}) const;  // (B, T, C)
};

}  // namespace mica::nn
