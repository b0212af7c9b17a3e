#pragma once

// From packed integers to the 16-bit fragments that tensor cores multiply, and what makes weights of them. README.md
// has the picture. Included by quantized_sm90.cu only.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/wgmma.cuh>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels::quantized_cuda {

// Scales or zeros.
struct FactorMatrix {
  enum Kind { kNone, kOne, kNarrow, kWide };  // one number, or numbers of the type of x or float32

  const void* data = nullptr;
  int kind = kNone;

  FactorMatrix() = default;
  explicit FactorMatrix(const Tensor& x) {
    if (x.defined()) {
      data = x.raw_data();
      kind = x.dim() == 0 ? kOne : x.dtype() == float32 ? kWide : kNarrow;
    }
  }
  __device__ bool each() const { return kind >= kNarrow; }
  __device__ int size() const { return kind == kWide ? 4 : 2; }
};

// What a weight is made of: q and these.
struct Grids {
  FactorMatrix scale;
  FactorMatrix zero;
  bool adds;  // the zero; else it is subtracted
};

// Two 16-bit floats in a register, the first one low.

template <class T>
__device__ float2 to_floats(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, Half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}

// A thread has 8 neighbors along K of a column, an octet: a word of 4 bits, two of 8 bits, or a part of one.
// The pair c of an octet is its members c and c + 4, as two 16-bit floats in a register.

template <int kBits>
constexpr int kWordsEach = kBits == 8 ? 2 : 1;

__device__ inline std::uint32_t bytes_of(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  return __byte_perm(a, b, selector);
}

/// An octet so that the lowest bits of its members c and c + 4 lie 16 bits apart; `place` is that of the octet among
/// the 4 of a unit.
template <int kBits>
__device__ std::uint32_t spread(std::uint32_t word, int place) {
  if constexpr (kBits == 2) {
    const std::uint32_t first = place % 2 * 2;
    return bytes_of(word, 0, 0x4040 | first | (first + 1) << 8);
  } else if constexpr (kBits == 1) {
    return bytes_of(word, 0, 0x4440 | place) * 0x1001;
  } else {
    return word;
  }
}

// What is added to the integers of pairs.
template <class T, int kBits>
constexpr float kAdded = kBits == 8 && std::is_same_v<T, BFloat16> ? 0 : 1 << kBits;

/// Two integers plus kAdded as T, exactly and without a conversion: their bits are the first ones of the fraction of
/// 2^kBits. The fraction of bfloat16 is too short for 8 bits, which take the way through that of float32.
template <class T, int kBits>
__device__ std::uint32_t pair_at(const std::uint32_t (&octet)[kWordsEach<kBits>], int c) {
  if constexpr (kAdded<T, kBits> == 0) {
    const float low = __uint_as_float(bytes_of(octet[0], 0x4B000000, 0x7440 | c)) - 0x1p23f;
    const float high = __uint_as_float(bytes_of(octet[1], 0x4B000000, 0x7440 | c)) - 0x1p23f;
    return bytes_of(__float_as_uint(low), __float_as_uint(high), 0x7632);
  } else {
    constexpr int kFraction = std::is_same_v<T, Half> ? 10 : 7;
    constexpr int kBias = std::is_same_v<T, Half> ? 15 : 127;
    constexpr std::uint32_t kBoth = 0x00010001;
    constexpr std::uint32_t kMask = (((1u << kBits) - 1) << (kFraction - kBits)) * kBoth;
    constexpr std::uint32_t kPower = (static_cast<std::uint32_t>(kBias + kBits) << kFraction) * kBoth;
    const std::uint32_t both = kBits == 8 ? bytes_of(octet[0], octet[1], 0x0400 | c << 8 | c) : octet[0];
    const int shift = (kBits == 8 ? 0 : c * kBits) - (kFraction - kBits);
    const std::uint32_t moved = shift < 0 ? both << -shift : both >> shift;
    std::uint32_t result;  // (moved & kMask) | kPower, in one instruction
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(moved), "n"(kMask), "r"(kPower));
    return result;
  }
}

/// Neighboring words at an address of shared memory.
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

// The octets of a thread's columns in one unit.
template <int kBits, int kColumnsEach>
struct Octets {
  std::uint32_t words[kColumnsEach][kWordsEach<kBits>];

  /// The first word of this thread is at `address`.
  __device__ void load(std::uint32_t address, int pitch, int place) {
    std::uint32_t rows[kWordsEach<kBits>][kColumnsEach];
#pragma unroll
    for (int i = 0; i < kWordsEach<kBits>; ++i) {
      load_words(address + i * pitch, rows[i]);
    }
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c) {
#pragma unroll
      for (int i = 0; i < kWordsEach<kBits>; ++i) {
        words[c][i] = spread<kBits>(rows[i][c], place);
      }
    }
  }

  /// The fragment of one of a unit's two steps, of columns 2 half and 2 half + 1.
  template <class T>
  __device__ void get(int half, int step, std::uint32_t (&fragment)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[i] = pair_at<T, kBits>(words[2 * half + i % 2], 2 * step + i / 2);
    }
  }
};

// What makes weights of the pairs of a thread's columns: q · scale + offset, where q has kAdded in it.
template <int kColumnsEach>
struct Factors {
  float scale[kColumnsEach];
  float offset[kColumnsEach];

  /// Makes all weights 0 otherwise.
  __device__ void keep_if(bool keep) {
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c) {
      scale[c] = keep ? scale[c] : 0;
      offset[c] = keep ? offset[c] : 0;
    }
  }
};

/// Values of float32, or of T.
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

template <class T, int kBits, int kColumnsEach>
__device__ Factors<kColumnsEach> load_factors(const Grids& grids, float one_zero, std::uint32_t scales,
                                              std::uint32_t zeros) {
  Factors<kColumnsEach> result;
  float zero[kColumnsEach];
#pragma unroll
  for (int c = 0; c < kColumnsEach; ++c) {
    result.scale[c] = 1;
    zero[c] = one_zero;
  }
  if (grids.scale.each()) {
    load_values<T>(scales, grids.scale.kind == FactorMatrix::kWide, result.scale);
  }
  if (grids.zero.each()) {
    load_values<T>(zeros, grids.zero.kind == FactorMatrix::kWide, zero);
  }
  if (grids.adds) {
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c) {
      result.offset[c] = fmaf(-kAdded<T, kBits>, result.scale[c], zero[c]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kColumnsEach; ++c) {
      result.offset[c] = (-kAdded<T, kBits> - zero[c]) * result.scale[c];
    }
  }
  return result;
}

/// Makes weights of a fragment of integers.
template <class T>
__device__ void scale(std::uint32_t (&fragment)[4], const Factors<2>& factors) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = to_floats<T>(fragment[i]);
    fragment[i] = cuda::pair_of<T>(fmaf(two.x, factors.scale[i % 2], factors.offset[i % 2]),
                                   fmaf(two.y, factors.scale[i % 2], factors.offset[i % 2]));
  }
}

}  // namespace mica::kernels::quantized_cuda
