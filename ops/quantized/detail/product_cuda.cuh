#pragma once

// Parts of the kernels for tensor cores: the description of a product, reading scales and zeros, and writing y.
// Included by .cu files only.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels::quantized_cuda {

inline constexpr int kUnit = 32;  // rows of the weight in a unit, all in one group; a thread has 8 of them per column

// Scales or zeros.
struct FactorMatrix {
  enum Kind { kNone, kOne, kNarrow, kWide };  // absent, a scalar, a matrix of x's type, or a matrix of float32

  const void* data = nullptr;
  int kind = kNone;

  FactorMatrix() = default;
  explicit FactorMatrix(const Tensor& x) {
    if (x.defined()) {
      data = x.raw_data();
      kind = x.dim() == 0 ? kOne : x.dtype() == float32 ? kWide : kNarrow;
    }
  }
  __host__ __device__ bool each() const { return kind >= kNarrow; }
  __host__ __device__ int size() const { return kind == kWide ? 4 : 2; }
};

// The scales and zeros that convert q to weights.
struct Grids {
  FactorMatrix scale;
  FactorMatrix zero;
  bool adds;  // whether the zero is added; otherwise it is subtracted

  /// The zero of all columns, if zeros are not a matrix.
  __device__ float one_zero() const {
    return zero.kind == FactorMatrix::kOne ? *static_cast<const float*>(zero.data) : 0;
  }
};

// The arguments of a product on tensor cores: y (m, columns) = row_factors · (x · weight) · column_factors.
struct Product {
  const std::uint32_t* words;
  Grids grids;
  int columns;
  int rows;         // rows of the weight, K
  int group_shift;  // a group is 1 << group_shift rows
  int m;
  void* y;
  const float* row_factors;     // or null
  const float* column_factors;  // or null
};

// Functions on two 16-bit floats in a register, the first one in the low half.

template <class T>
__device__ float2 to_floats(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Float16>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}

__device__ inline std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  return __byte_perm(a, b, selector);
}

template <class T>
constexpr int kFraction = std::is_same_v<T, Float16> ? 10 : 7;  // bits of the fraction (mantissa)
template <class T>
constexpr int kBias = std::is_same_v<T, Float16> ? 15 : 127;  // of the exponent

/// Converts two integers of kBits bits to T, plus 2^(kFraction − kFirst). Their lowest bits are at bit kFirst of each
/// half of a register, and become bits of a float's fraction without a conversion instruction.
template <class T, int kBits, int kFirst>
__device__ std::uint32_t as_fractions(std::uint32_t integers) {
  constexpr std::uint32_t kBoth = 0x00010001;
  constexpr std::uint32_t kMask = (((1u << kBits) - 1) << kFirst) * kBoth;
  constexpr std::uint32_t kPower = (static_cast<std::uint32_t>(kBias<T> + kFraction<T> - kFirst) << kFraction<T>)*kBoth;
  std::uint32_t result;  // (integers & kMask) | kPower, in one instruction
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(integers), "n"(kMask), "r"(kPower));
  return result;
}

/// Converts one byte of each of two words to bfloat16, through float32, since bfloat16's fraction has fewer than 8
/// bits. The selectors' lowest digits choose the bytes.
__device__ inline std::uint32_t as_bfloat16(std::uint32_t a, std::uint32_t a_selector, std::uint32_t b,
                                            std::uint32_t b_selector) {
  const float low = __uint_as_float(bytes_of(a, 0x4B000000, a_selector)) - 0x1p23f;
  const float high = __uint_as_float(bytes_of(b, 0x4B000000, b_selector)) - 0x1p23f;
  return bytes_of(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
inline constexpr std::uint32_t kByteOfFloat = 0x7440;  // the selector for byte 0; add 1 to 3 for the others

/// Loads adjacent words from shared memory.
template <int kSize>
__device__ void load_words(std::uint32_t from, std::uint32_t (&to)[kSize]) {
  if constexpr (kSize == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  } else if constexpr (kSize == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
  }
}

/// Reads values of float32 or T.
template <class T, int kSize>
__device__ void load_values(std::uint32_t from, bool wide, float (&to)[kSize]) {
  if (wide) {
    std::uint32_t bits[kSize];
    load_words(from, bits);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      to[i] = __uint_as_float(bits[i]);
    }
  } else {
    std::uint32_t pairs[kSize / 2];
    load_words(from, pairs);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float2 two = to_floats<T>(pairs[i]);
      to[2 * i] = two.x;
      to[2 * i + 1] = two.y;
    }
  }
}

// The scales and zeros of a thread's columns.
template <int kColumnsEach>
struct OwnGrids {
  float scale[kColumnsEach];
  float zero[kColumnsEach];
};

/// Reads a thread's scales and zeros from shared memory.
template <class T, int kColumnsEach>
__device__ OwnGrids<kColumnsEach> load_grids(const Grids& grids, std::uint32_t scales, std::uint32_t zeros) {
  OwnGrids<kColumnsEach> own;
  if (grids.scale.kind == FactorMatrix::kNarrow && grids.zero.kind == FactorMatrix::kNarrow) {  // the usual case
    load_values<T>(scales, false, own.scale);
    load_values<T>(zeros, false, own.zero);
    return own;
  }
#pragma unroll
  for (int c = 0; c < kColumnsEach; ++c) {
    own.scale[c] = 1;
    own.zero[c] = grids.one_zero();
  }
  if (grids.scale.each()) {
    load_values<T>(scales, grids.scale.kind == FactorMatrix::kWide, own.scale);
  }
  if (grids.zero.each()) {
    load_values<T>(zeros, grids.zero.kind == FactorMatrix::kWide, own.zero);
  }
  return own;
}

__device__ inline float4 plus(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

/// Writes four adjacent elements of a row of y.
template <class T>
__device__ void store_row(const Product& a, int row, int column, float4 sum) {
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    values[c] *= a.column_factors != nullptr ? a.column_factors[column + c] : 1.0f;
    values[c] *= a.row_factors != nullptr ? a.row_factors[row] : 1.0f;
  }
  *reinterpret_cast<uint2*>(static_cast<T*>(a.y) + std::int64_t{row} * a.columns + column) =
      make_uint2(cuda::pair_of<T>(values[0], values[1]), cuda::pair_of<T>(values[2], values[3]));
}

}  // namespace mica::kernels::quantized_cuda
