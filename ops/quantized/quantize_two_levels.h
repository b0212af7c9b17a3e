#pragma once

#include <cstdint>

#include <mica/ops/quantized/quantized.h>

namespace mica {

struct TwoLevelOptions {
  int bits = 4;                  ///< 4 or 2
  std::int64_t group_size = 32;  ///< 16, 32, 64 or 128
};

/// Quantizes a floating weight (K, N) with scales and zeros of two levels, in mode scale_and_shift: for less memory
/// than quantize() takes, or smaller groups. 4 bits in groups of 32 take 4.625 bits a weight, in groups of 64 4.375.
///
/// The integers of a group cover its weights and 0, as with QuantizationScheme::fitted; dequantize() differs from the
/// weight by at most ½ + (2^bits − 1) / 253 scales. The factors are bfloat16. Computed on the CPU in float64, then
/// moved to the weight's device. Not differentiable.
///
/// Throws Error if an option is invalid, if a weight is infinite or NaN, and if a factor is out of range.
QuantizedWeight quantize_two_levels(const Tensor& weight, TwoLevelOptions options = {});

}  // namespace mica
