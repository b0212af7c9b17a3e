#pragma once

#include <cstdint>

#include <mica/core/tensor.h>
#include <mica/ops/attention/attention_dropout.h>

namespace mica::detail {

/// AttentionOptions with all that they leave open decided.
struct AttentionRule {
  double scale = 1;
  bool causal = false;
  std::int64_t causal_offset = 0;
  WeightDropout dropout{};
};

/// Attention made of recorded ops, for checked arguments; `mask` may be undefined. 16-bit inputs are cast to float32
/// first and the result back.
Tensor composed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          const AttentionRule& rule);

/// The gradients of q, k and v for dy, made of recorded ops; the mask is a constant.
Tensors composed_attention_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                                     const Tensor& dy, const AttentionRule& rule);

}  // namespace mica::detail
