#pragma once

// Blocks of quantized elements, as ggml defines them. All types decode by one formula: an element of group g is
//
//     x = d · scale[g] · (q − zero) + low · least[g]
//
// where scale, least and q are integers, and d and low are floats of the block. gguf_blocks.cpp has a table of the
// parts that each type has. A QuantizedWeight holds any of them with the same values:
//
//     type            bits in the file   packed as                                              bits when packed
//     Q4_0            4.5                4, groups of 32, float16 scale, one zero               4.5
//     Q4_1            5                  4, groups of 32, float16 scale and zero                5
//     Q5_0, Q5_1      5.5, 6             8, like Q4_0 and Q4_1                                  8.5, 9
//     Q8_0            8.5                8, like Q4_0                                           8.5
//     Q2_K            2.625              2, groups of 16, scale and zero of two levels          3.125
//     Q3_K            3.4375             4, groups of 16, scale of two levels, one zero         4.5625
//     Q4_K            4.5                4, groups of 32, scale and zero of two levels          4.625
//     Q5_K            5.5                8, like Q4_K                                           8.625
//     Q6_K            6.5625             8, like Q3_K                                           8.5625
//     Q8_K            9.125              8, groups of 128, float32 scale, one zero              8.25
//     IQ4_NL          4.5                8 (its 16 values are not equidistant), like Q4_0       8.5
//     IQ4_XS          4.25               8, groups of 32, like Q3_K                             8.3125
//     MXFP4           4.25               8, groups of 32, bfloat16 scale, one zero              8.5
//
// In two levels, the factors are float16: see QuantizedWeight.

#include <cstddef>
#include <cstdint>
#include <span>

#include <mica/io/gguf_types.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::io::detail {

/// How a type is stored. Types that are not quantized have blocks of one element.
struct GgufBlock {
  std::uint64_t elements, bytes;
};
GgufBlock gguf_block(GgufType type);

/// Writes blocks of q8_0, q4_0, q4_k or q6_k; sizes are multiples of a block's. Returns false if a scale is not finite:
/// an element is not finite, or too large for float16. q8_0 and q4_0 have the bits of ggml's own. For the other two,
/// scales are found by a search of our own, so that blocks differ from llama.cpp's but mean what it reads.
bool gguf_quantize(GgufType type, std::span<const float> x, std::byte* blocks);

/// The elements of blocks of any quantized type, with the bits of llama.cpp's package `gguf`.
void gguf_dequantize(GgufType type, const std::byte* blocks, std::span<float> x);

/// A matrix of blocks with `out` rows of `in` elements as the weight (in, out) of a linear layer, packed as above:
/// every element has the same value, except that −0 may become 0.
QuantizedWeight gguf_packed(GgufType type, const std::byte* blocks, std::int64_t out, std::int64_t in);

}  // namespace mica::io::detail
