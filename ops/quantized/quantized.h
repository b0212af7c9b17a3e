#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include <mica/core/tensor.h>

namespace mica {

// Matrix products with weights of 8, 4, 2 or 1 bits. Layout, formulas and error bounds: README.md beside this file.

/// Which weight a stored integer q represents; s and z are the scale and the zero of its group.
enum class QuantizationMode : std::uint8_t {
  packed,              ///< q
  shift,               ///< q − z
  scale,               ///< q · s
  scale_and_shift,     ///< (q − z) · s
  fused_multiply_add,  ///< q · s + z
};

/// As a group_size: each column is a single group.
inline constexpr std::int64_t kWholeColumn = -1;

/// A weight (K, N), stored as small integers. A plain struct: fill it from a checkpoint or by quantize(); the functions
/// below check it.
///
/// A group is group_size consecutive rows of one column; the last one is shorter if K is not a multiple. A column has
/// G = groups() of them.
///
/// Scales and zeros may have two levels, which take less memory: `scale` is then uint8, and group g has the scale
/// (scale[g, n] − 128) · scale_factor[k / 256, n], with k the group's first row; likewise zero and zero_factor.
struct QuantizedWeight {
  Tensor packed = {};  ///< int32 (⌈K · bits / 32⌉, N): each word holds 32 / bits consecutive rows of a column, the
                       ///< first in the lowest bits
  Tensor scale = {};   ///< floating or uint8 (G, N); undefined in the modes packed and shift
  Tensor zero = {};    ///< like scale, or floating () if all are equal; undefined in the modes packed and scale
  Tensor scale_factor = {};      ///< floating (⌈K / 256⌉, N) if scale is uint8, else undefined
  Tensor zero_factor = {};       ///< floating (⌈K / 256⌉, N) if zero is uint8, else undefined
  std::int64_t rows = 0;         ///< K
  int bits = 4;                  ///< 8, 4, 2 or 1
  std::int64_t group_size = 64;  ///< 16 (not for 1 bit), 32, 64, 128 or kWholeColumn (not for two levels)
  QuantizationMode mode = QuantizationMode::scale_and_shift;

  std::int64_t columns() const { return packed.size(1); }  // N
  std::int64_t groups() const;
};

/// The tensors of a QuantizedWeight and their names.
inline constexpr std::array<std::pair<const char*, Tensor QuantizedWeight::*>, 5> quantized_parts() {
  return {{{"packed", &QuantizedWeight::packed},
           {"scale", &QuantizedWeight::scale},
           {"zero", &QuantizedWeight::zero},
           {"scale_factor", &QuantizedWeight::scale_factor},
           {"zero_factor", &QuantizedWeight::zero_factor}}};
}

/// Throws Error unless q's tensors match each other and q's format. The message starts with `op` and names the field.
void check_weight(const char* op, const QuantizedWeight& q);

enum class QuantizationScheme : std::uint8_t {
  asymmetric,  ///< the integers cover the range from the smallest to the largest weight of a group
  symmetric,   ///< the range is symmetric about 0; `zero` is one scalar
  fitted,      ///< like asymmetric, but with 2 and 4 bits the zero is not rounded to an integer, so that the
               ///< integers fit the range; a weight of 0 is then not exact
};

struct QuantizeOptions {
  int bits = 4;
  std::int64_t group_size = 64;
  QuantizationScheme scheme = QuantizationScheme::fitted;
  /// scale_and_shift; or fused_multiply_add, not with the symmetric scheme, which is more accurate with few bits.
  QuantizationMode mode = QuantizationMode::scale_and_shift;
  DType dtype = float32;  ///< of scale and zero: float32, float16 or bfloat16
};

/// Quantizes a floating weight (K, N), rounding to nearest: dequantize() differs from the weight by at most half a
/// scale. Computed on the CPU in float64, then moved to the weight's device. Not differentiable. README.md has the
/// formulas.
///
/// Throws Error if an option is invalid, if a weight is infinite or NaN, or if a scale or zero is out of the range of
/// options.dtype.
QuantizedWeight quantize(const Tensor& weight, QuantizeOptions options = {});

/// The weight (K, N) that q represents, in any floating dtype: computed in float32 (float64 for float64) and rounded
/// once. Not differentiable. Throws Error if check_weight() does or if dtype is not floating.
Tensor dequantize(const QuantizedWeight& q, DType dtype = float32);

/// Columns of q as rows of an embedding table: y[i, :] is column indices[i] of dequantize(q, dtype), for int64 or int32
/// indices of any shape (…), as (…, K). Dequantizes no other columns. Not differentiable. An index out of range is an
/// Error on the CPU, and reads NaN on CUDA (mode packed and shift: 0 − zero).
Tensor quantized_embedding(const QuantizedWeight& q, const Tensor& indices, DType dtype);

/// Packs integers (K, N) in [0, 2^bits) into int32 words, as in QuantizedWeight::packed. CPU only. Throws Error for
/// other values.
Tensor pack_bits(const Tensor& values, int bits);
/// The first `rows` rows of packed integers: uint8 (rows, N). CPU only. Throws Error unless `packed` has the shape for
/// that number of rows.
Tensor unpack_bits(const Tensor& packed, int bits, std::int64_t rows);

/// Factors for the columns and rows of a product, of any floating dtype. Each may be undefined, for 1. They are
/// constants: a factor that requires a gradient throws while gradients are recorded.
struct ChannelScales {
  Tensor columns = {};  ///< (N)
  Tensor rows = {};     ///< of the shape of x without its last axis
};

/// y = x · dequantize(q), with row r and column n multiplied by channels.rows[r] and channels.columns[n]. x is (…, K),
/// floating; y is (…, N), of x's dtype. Any strides and sizes, including 0.
///
/// Weights are dequantized, products summed and sums scaled in float32 (float64 for float64 x), and the result is
/// rounded once. On CUDA, gradients, and products of more than 16 rows, use the weight rounded to x's dtype. On the
/// CPU, the bits of a row of y depend neither on other rows nor on the number of threads. Differentiable in x any
/// number of times; weights and channel scales are constants.
///
/// Throws Error if x is not floating, if a shape or device does not match, or if a scale, zero or channel scale
/// requires a gradient while gradients are recorded.
Tensor quantized_matmul(const Tensor& x, const QuantizedWeight& q, const ChannelScales& channels = {});

}  // namespace mica
