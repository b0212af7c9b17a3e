#pragma once

// Blocks of 32 quantized elements, as ggml defines them:
//
//   q8_0: | scale, float16 | 32 × int8 |                                     x = scale · q
//   q4_0: | scale, float16 | 16 bytes: elements 0…15 low, 16…31 high |       x = scale · (q − 8)

#include <cstddef>
#include <cstdint>
#include <span>

namespace mica::io::detail {

inline constexpr std::int64_t kBlockElements = 32;
inline constexpr std::int64_t kQ8Bytes = 34, kQ4Bytes = 18;

/// Sizes are multiples of a block's. The quantizing functions return false if a scale is not finite: an element is not
/// finite, or too large for float16.
bool quantize_q8(std::span<const float> x, std::byte* blocks);
bool quantize_q4(std::span<const float> x, std::byte* blocks);

void dequantize_q8(const std::byte* blocks, std::span<float> x);
void dequantize_q4(const std::byte* blocks, std::span<float> x);

}  // namespace mica::io::detail
