#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/decode/decode.h>

namespace mica::kernels {

inline constexpr std::int64_t kMostDecodeRows = 32;
inline constexpr int kMostDecodeWeights = 3;

/// decode_linear() of checked, contiguous arguments that DecodePlan supports.
struct DecodeLinearArgs {
  const Tensor& x;
  const std::vector<DecodeWeight>& weights;
  const DecodeLinearOptions& options;
  const Tensor& y;  // out
};
void decode_linear(Cuda, const DecodeLinearArgs& args);

struct DecodeAttentionArgs {
  const DecodeAttention& problem;
  const Tensor& y;  // out
};
void decode_attention(Cuda, const DecodeAttentionArgs& args);

}  // namespace mica::kernels
