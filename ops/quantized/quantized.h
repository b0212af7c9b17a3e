#pragma once

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica {

// Matrix products with weights of 8, 4, 2 or 1 bits. Layout, formulas and error bounds: README.md beside this file.

/// The weight that a stored integer q represents, with the scale s and the zero z of its group.
enum class QuantizationMode : std::uint8_t {
  packed,              ///< q
  shift,               ///< q − z
  scale,               ///< q · s
  scale_and_shift,     ///< (q − z) · s
  fused_multiply_add,  ///< q · s + z
};

/// A group_size: one group per column.
inline constexpr std::int64_t kWholeColumn = -1;

/// A weight (K, N) of small integers. A plain struct: fill it from a checkpoint, or by quantize(). The functions below
/// check it.
///
/// Groups are runs of group_size rows of one column, the last one shorter if K is no multiple; there are G = groups().
struct QuantizedWeight {
  Tensor packed = {};     ///< int32 (⌈K · bits / 32⌉, N): 32 / bits neighbors along K a word, the first lowest
  Tensor scale = {};      ///< floating (G, N); undefined in the modes packed and shift
  Tensor zero = {};       ///< floating (G, N), or () for all of them; undefined in the modes packed and scale
  std::int64_t rows = 0;  ///< K
  int bits = 4;           ///< 8, 4, 2 or 1
  std::int64_t group_size = 64;  ///< 32, 64, 128 or kWholeColumn
  QuantizationMode mode = QuantizationMode::scale_and_shift;

  std::int64_t columns() const { return packed.size(1); }  // N
  std::int64_t groups() const;
};

/// Throws Error, starting with `op` and naming the field, unless q's tensors match each other and its format.
void check_weight(const char* op, const QuantizedWeight& q);

enum class QuantizationScheme : std::uint8_t {
  asymmetric,  ///< from the least to the greatest weight of a group
  symmetric,   ///< as far below 0 as above; the zero is one scalar
};

struct QuantizeOptions {
  int bits = 4;
  std::int64_t group_size = 64;
  QuantizationScheme scheme = QuantizationScheme::asymmetric;
  /// scale_and_shift, or with the asymmetric scheme fused_multiply_add, which is more accurate with few bits.
  QuantizationMode mode = QuantizationMode::scale_and_shift;
  DType dtype = float32;  ///< of scale and zero: float32, float16 or bfloat16
};

/// Rounds a floating weight (K, N) to the nearest integers of its groups: the error of dequantize() is at most half a
/// scale. Computed on the CPU in float64, then moved to the weight's device. No gradient flows through it.
///
/// Throws Error if an option is invalid, if a weight is infinite or NaN, or if a scale is out of the range of dtype.
QuantizedWeight quantize(const Tensor& weight, QuantizeOptions options = {});

/// The weight (K, N) that q represents, in a floating dtype: computed in float32 (float64 for float64), rounded once.
/// No gradient flows through it.
Tensor dequantize(const QuantizedWeight& q, DType dtype = float32);

/// Packs integers (K, N) in [0, 2^bits) as in a QuantizedWeight. On the CPU; throws Error for other values.
Tensor pack_bits(const Tensor& values, int bits);
/// The first `rows` rows of packed integers, as uint8. On the CPU.
Tensor unpack_bits(const Tensor& packed, int bits, std::int64_t rows);

/// Factors for the columns and rows of a product, of any floating dtype; each may be undefined. They are constants.
struct ChannelScales {
  Tensor columns = {};  ///< (N)
  Tensor rows = {};     ///< the leading axes of x
};

/// y = x · dequantize(q), times the channel scales, for x (…, K); y is (…, N), of the dtype of x. Any strides and
/// sizes, including 0.
///
/// Weights are dequantized, products summed and the sum scaled in float32 (float64 for float64), and rounded once. On
/// CUDA, gradients and products of more than 16 rows use the weight rounded to x's dtype. On the CPU, the bits of a row
/// of y depend neither on other rows nor on the number of threads. Differentiable in x any number of times; weights and
/// channel scales are constants.
///
/// Throws Error if x is not floating, if a shape or device does not match, or if a scale or zero requires a gradient
/// while gradients are recorded.
Tensor quantized_matmul(const Tensor& x, const QuantizedWeight& q, const ChannelScales& channels = {});

}  // namespace mica
