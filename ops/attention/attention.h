#pragma once

#include <optional>

#include <mica/core/tensor.h>

namespace mica {

struct AttentionOptions {
  bool causal = false;            ///< query i sees the keys up to i only, counted from the first of each
  std::optional<double> scale{};  ///< of the scores; 1/√D unless given
  double dropout = 0;             ///< share of the weights that is dropped; to be left at 0 outside of training
};

/// Attention: y = dropout(softmax(scale · q · kᵀ)) · v, where a causal mask takes keys j > i out of row i's softmax.
///
/// q (B, H, T, D), k (B, H, S, D), v (B, H, S, Dv) of one floating dtype on one device; any number of leading axes,
/// equal in all three. Returns (B, H, T, Dv). Without keys (S = 0) it is zeros. Scores and weights are tensors of (B,
/// H, T, S) in the dtype of q; the softmax is computed in float32 for 16-bit floats.
///
/// Vaswani et al., Attention Is All You Need, 2017.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options = {});

}  // namespace mica
