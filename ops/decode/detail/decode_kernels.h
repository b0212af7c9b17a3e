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

/// The same for floating weights and 9 to 32 rows, on a GPU with wgmma.
void decode_linear_batch(Cuda, const DecodeLinearArgs& args);

/// The same for any number of rows of contiguous x and floating weights of a 16-bit dtype, and no norm.
void decode_linear_many(Cuda, const DecodeLinearArgs& args);
/// Whether the device, sizes and alignment allow it.
bool can_decode_linear_many(Cuda, const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options);

/// y = rms_norm(x), all contiguous and of one 16-bit dtype, rows and weight aligned to 16 bytes.
struct DecodeNormArgs {
  const Tensor& x;  // (M, in)
  const Tensor& weight;
  double eps;
  const Tensor& y;  // out
};
void decode_norm(Cuda, const DecodeNormArgs& args);

struct DecodeAttentionArgs {
  const DecodeAttention& problem;
  const Tensor& y;  // out
};
void decode_attention(Cuda, const DecodeAttentionArgs& args);

struct DecodeAppendArgs {
  const DecodeAttention& problem;
  std::int64_t first;     // position
  const Tensor& queries;  // out: (B, T, H, D)
};
void decode_append(Cuda, const DecodeAppendArgs& args);

}  // namespace mica::kernels
