#pragma once

#include <cstdint>

#include <mica/core/tensor.h>
#include <mica/ops/attention/detail/attention_dropout.h>

namespace mica::detail {

/// AttentionOptions with all defaults resolved.
struct AttentionRule {
  double scale = 1;
  double cap = 0;  // only in composed_attention()
  bool causal = false;
  std::int64_t causal_offset = 0;
  std::int64_t window = 0;  // 0 also if every query's window reaches back to the first key
  WeightDropout dropout{};
};

/// A boolean mask (rows, columns): true where column > row + shift.
Tensor columns_after(std::int64_t rows, std::int64_t columns, std::int64_t shift, Device device);

/// Attention by recorded ops, for validated arguments without a window; `mask` may be undefined. 16-bit inputs are cast
/// to float32, and the result is cast back.
Tensor composed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          const AttentionRule& rule);

/// The gradients of q, k and v, given that of the result, dy; by recorded ops. The mask is a constant.
Tensors composed_attention_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                                     const Tensor& dy, const AttentionRule& rule);

}  // namespace mica::detail
