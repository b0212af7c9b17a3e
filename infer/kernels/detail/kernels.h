#pragma once

#include <mica/core/dispatch.h>
#include <mica/infer/kernels/detail/decode_linear.h>
#include <mica/infer/kernels/detail/decoder_step.h>

namespace mica::kernels {

using infer::DecodeLinearOptions;
using infer::DecoderLayer;
using infer::DecoderStep;
using infer::DecodeWeight;

inline constexpr std::int64_t kMultiple = 64;  // divides all sizes that the kernels for few rows support
inline constexpr std::int64_t kMostDecodeRows = 32;
inline constexpr int kMostDecodeWeights = 3;
inline constexpr std::int64_t kFewRowsOfFourBits = 16;  // the most rows of decode_linear() with 4-bit weights

/// Where decode_linear_many() stores keys and values, from position `first` on.
struct DecodeAppendTo {
  Tensor keys{};  // (B, Hkv, C, D)
  Tensor values{};
  Tensor rotations{};  // decode_rotations()
  std::int64_t first = 0;
  std::int64_t steps = 0;
};

/// decode_linear() of checked, contiguous arguments that the kernels support (few_rows_kernel() in decode_linear.cpp).
struct DecodeLinearArgs {
  const Tensor& x;
  const std::vector<DecodeWeight>& weights;
  const DecodeLinearOptions& options;
  const Tensor& y;          // out
  DecodeAppendTo append{};  // for decode_linear_many(); if defined, y has the queries only, (B · T, H · D)
};
void decode_linear(Cuda, const DecodeLinearArgs& args);

/// The same by wgmma, on a GPU that has it. few_rows_kernel() decides from how many rows on it is used.
void decode_linear_batch(Cuda, const DecodeLinearArgs& args);

/// The same for weights of many outputs and up to 32 rows of x, which stay in shared memory.
void decode_linear_wide(Cuda, const DecodeLinearArgs& args);
/// Whether the device supports decode_linear_wide(), and x fits into shared memory.
bool can_decode_linear_wide(Cuda, const Tensor& x);

/// The same for any number of rows. x is contiguous, weights are floating, both are of one 16-bit dtype, and there is
/// no norm.
void decode_linear_many(Cuda, const DecodeLinearArgs& args);
/// Whether the device supports decode_linear_many(), and the kernel supports the sizes and the alignment.
bool can_decode_linear_many(Cuda, const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options);

/// Whether decode_linear_many() can append to the cache: for heads of 64 columns without norms of their own, no
/// padding, and one sequence or a multiple of 64 positions.
bool can_decode_linear_append(Cuda, const DecodeAppendTo& to, const DecodeAttention& a);

struct DecodeRotationsArgs {
  const std::vector<float>& frequencies;
  double scale;
  std::int64_t first;       // the first position
  const Tensor& rotations;  // out: (T, D / 2, 2) float32
};
void decode_rotations(Cuda, const DecodeRotationsArgs& args);

struct DecodeAppendArgs {
  const DecodeAttention& problem;
  const Tensor& qkv;      // (B · T, (H + 2 Hkv) · D)
  std::int64_t first;     // the first position
  const Tensor& queries;  // out: (B, T, H, D)
};
void decode_append(Cuda, const DecodeAppendArgs& args);

/// The group_shift of a quantized weight that the kernels support: a group has 64 · 2^group_shift terms. If a group is
/// a whole column, this number of terms is larger than any depth.
inline int group_shift(const QuantizedWeight& q) {
  constexpr int kWhole = 30;
  int shift = 0;
  while (q.group_size == kWholeColumn ? shift < kWhole : (std::int64_t{64} << shift) < q.group_size) {
    ++shift;
  }
  return shift;
}

/// Whether x is undefined, or contiguous and aligned to 16 bytes.
bool is_aligned(const Tensor& x);

/// Whether the kernels support weight w in a call whose first weight is `first`, for x of `dtype`.
bool kernel_takes(const DecodeWeight& w, const DecodeWeight& first, DType dtype);

struct DecoderStepArgs {
  const DecoderStep& problem;
  const Tensor& logits;  // out
};
void decoder_step(Cuda, const DecoderStepArgs& args);

/// Whether the layers fit into the kernel's tables and into shared memory, on the current device.
bool fits_decoder_step(Cuda, const DecoderStep& step);

inline constexpr std::int64_t kDecoderStepState = 8;    // elements of the scratch before the words, for StepState
inline constexpr std::int64_t kMostAttentionParts = 8;  // the most parts that a head's keys are split into

inline constexpr std::int64_t kWordSpread = 4;  // words of elements take up this many times their size: see place()

/// The number of 32-bit words through which the phases of a layer exchange results. A word holds two elements, or one
/// float of a part of attention. The scratch has two such lists of words, so this is also the number of int64 for both.
inline std::int64_t decoder_step_words(std::int64_t width, std::int64_t hidden, std::int64_t heads,
                                       std::int64_t key_heads, std::int64_t head_width) {
  const std::int64_t elements = (2 * heads + 2 * key_heads) * head_width + 2 * width + hidden;
  return elements / 2 * kWordSpread + heads * kMostAttentionParts * (head_width + 2);
}

}  // namespace mica::kernels
