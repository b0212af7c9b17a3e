#pragma once

#include <optional>

#include <mica/nn/dropout.h>
#include <mica/nn/key_value_cache.h>
#include <mica/nn/linear.h>
#include <mica/nn/module.h>

namespace mica::nn {

struct MultiheadAttentionOptions {
  std::int64_t heads = 1;  ///< must divide width
  double dropout = 0;      ///< of the attention weights and of the result
  bool causal = true;      ///< position t attends to positions 0 … t only
  bool bias = true;
  std::optional<double> attention_dropout{};  ///< of the attention weights, if it differs
};

/// Multi-head self-attention, x (B, T, width) to (B, T, width):
///
///     y = dropout(c_proj(self_attention(c_attn(x), heads)))
///
/// Parameters have GPT-2's names: c_attn.weight (3 · width, width) computes queries, keys and values together.
class MultiheadAttention : public Module {
 public:
  MultiheadAttention(std::int64_t width, MultiheadAttentionOptions options);

  Tensor operator()(const Tensor& x) const;
  /// The result without c_proj's bias and dropout, for callers that fuse these with the addition. `mask`: see
  /// AttentionOptions::mask. With `cached`, the positions of x follow those in the cache, and attend to these as well;
  /// not together with `mask`.
  Tensor branch(const Tensor& x, const Tensor& mask = {}, const CachedLayer& cached = {}) const;

  MultiheadAttentionOptions options;
  Linear c_attn;
  Linear c_proj;
  Dropout resid_dropout;

 private:
  Tensor attend(const Tensor& x, const Tensor& mask = {},
                const CachedLayer& cached = {}) const;  // all but c_proj and its dropout
};

}  // namespace mica::nn
