#pragma once

// Converts packed integers to 16-bit weights for the kernel for many rows. README.md has a picture. Included by
// many_rows_sm90.cu only.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/half.h>
#include <mica/ops/quantized/detail/product_cuda.cuh>

namespace mica::kernels::quantized_cuda {

inline constexpr int kColumnsEach = 2;  // adjacent columns per thread

// kPosition is the position of an integer's lowest bit in a float's fraction, and kAdded what this adds to the integer:
// 0 for 8 bits and bfloat16, whose fraction is too short, so that integers are converted.
template <int kBits>
constexpr int kPosition = kBits == 2   ? 4
                          : kBits == 1 ? 6
                                       : 0;
template <class T, int kBits>
constexpr int kAdded = kBits == 8 && std::is_same_v<T, BFloat16> ? 0 : 1 << (kFraction<T> - kPosition<kBits>);

/// Extracts a thread's integers from packed words. In wgmma's fragments, a thread with t = lane % 4 has members 2 t and
/// 2 t + 1 of every 8 consecutive integers along K of a column (an "eight").
template <class T, int kBits>
class PairReader {
 public:
  static constexpr int kEights = kBits == 8 ? 1 : 4 / kBits;  // eights per word; with 8 bits, an eight spans two words

  __device__ explicit PairReader(int t) {
    if constexpr (kBits == 8) {
      const int first = t % 2 * 2;
      selector_ = std::is_same_v<T, Float16> ? 0x4040 | first | (first + 1) << 8 : kByteOfFloat | first;
      factor_ = 0;
    } else if constexpr (kBits == 4) {
      selector_ = 0x4440 | t;
      factor_ = 1 | 1 << 12;
    } else if constexpr (kBits == 2) {
      selector_ = 0x4440 | t / 2;
      factor_ = (1 | 1 << 14) << (t % 2 == 0 ? 4 : 0);
    } else {
      selector_ = 0x4440;
      factor_ = (1 | 1 << 15) << (6 - 2 * t);
    }
    asm volatile("" : "+r"(selector_), "+r"(factor_));  // keeps the compiler from recomputing them at each use
  }

  /// The thread's two members of an eight, each plus kAdded, as T. `eight` is the index of the eight in the word.
  __device__ std::uint32_t get(std::uint32_t word, int eight) const {
    if constexpr (kBits == 8 && std::is_same_v<T, Float16>) {
      return bytes_of(word, 0x64646464, selector_);  // 2^10 + q
    } else if constexpr (kBits == 8) {
      return as_bfloat16(word, selector_, word, selector_ + 1);
    } else {
      // A byte contains both members. A multiplication makes two shifted copies, so that the members are 16 bits apart.
      const int step = kBits == 2 ? 2 : kBits == 1 ? 1 : 0;  // bytes of an eight
      return as_fractions<T, kBits, kPosition<kBits>>(bytes_of(word, 0, selector_ + eight * step) * factor_);
    }
  }

 private:
  std::uint32_t selector_;
  std::uint32_t factor_;
};

/// Converts a fragment of integers of two columns to weights: (q − zero) · scale, or q · scale + zero.
template <class T, int kBits>
__device__ void scale(std::uint32_t (&fragment)[4], bool adds, const OwnGrids<2>& own) {
  const auto weight = [&](float q, int c) {
    return adds ? fmaf(q - kAdded<T, kBits>, own.scale[c], own.zero[c])
                : (q - (kAdded<T, kBits> + own.zero[c])) * own.scale[c];
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = to_floats<T>(fragment[i]);
    fragment[i] = cuda::pair_of<T>(weight(two.x, i % 2), weight(two.y, i % 2));
  }
}

// The same conversion in the arithmetic of T, with two weights per instruction: (q − center) · scale + added, where q
// and center include kAdded.

/// Arithmetic on two 16-bit floats in a register.
template <class T>
class Pair {
  using Two = std::conditional_t<std::is_same_v<T, Float16>, __half2, __nv_bfloat162>;

  __device__ static Two two(std::uint32_t bits) { return *reinterpret_cast<const Two*>(&bits); }
  __device__ static std::uint32_t bits(Two two) { return *reinterpret_cast<const std::uint32_t*>(&two); }

 public:
  __device__ static std::uint32_t of(float value) { return cuda::pair_of<T>(value, value); }
  /// One of the two floats in both halves. It takes no instruction, since it is an operand modifier of others.
  __device__ static std::uint32_t twice(std::uint32_t a, int which) {
    if constexpr (std::is_same_v<T, Float16>) {
      return bits(which == 0 ? __low2half2(two(a)) : __high2half2(two(a)));
    } else {
      return bits(which == 0 ? __low2bfloat162(two(a)) : __high2bfloat162(two(a)));
    }
  }
  __device__ static std::uint32_t plus(std::uint32_t a, std::uint32_t b) { return bits(__hadd2(two(a), two(b))); }
  __device__ static std::uint32_t minus(std::uint32_t a, std::uint32_t b) { return bits(__hsub2(two(a), two(b))); }
  __device__ static std::uint32_t least(std::uint32_t a, std::uint32_t b) { return bits(__hmin2(two(a), two(b))); }
  __device__ static std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return bits(__hfma2(two(a), two(b), two(c)));
  }
};

// The factors of two neighboring columns, each duplicated in a register.
struct PairFactors {
  std::uint32_t center[2];
  std::uint32_t scale[2];
  std::uint32_t added[2];
};

/// Converts a fragment of integers to weights.
template <class T>
__device__ void scale(std::uint32_t (&fragment)[4], const PairFactors& factors) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    fragment[i] = Pair<T>::multiply_add(Pair<T>::minus(fragment[i], factors.center[i % 2]), factors.scale[i % 2],
                                        factors.added[i % 2]);
  }
}

// Converts a thread's integers to weights in the arithmetic of T, two at a time.
template <class T, int kBits>
class PairConverter {
 public:
  __device__ explicit PairConverter(const Grids& grids) : subtracts_(grids.adds ? 0 : ~0u) {
    asm volatile("" : "+r"(subtracts_));  // keeps the compiler from reloading it at each use
  }

  /// Whether this converter supports the weight: scales and zeros must have type T.
  __device__ static bool serves(const Grids& grids) {
    return grids.scale.kind != FactorMatrix::kWide && grids.zero.kind != FactorMatrix::kWide &&
           to_floats<T>(Pair<T>::of(grids.one_zero())).x == grids.one_zero();
  }

  template <int kCount>
  __device__ void convert(std::uint32_t scales, std::uint32_t zeros, std::uint32_t (*fragments)[4]) const {
    const PairFactors factors = load(scales, zeros);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scale<T>(fragments[i], factors);
    }
  }

 private:
  __device__ PairFactors load(std::uint32_t scales, std::uint32_t zeros) const {
    std::uint32_t scale[1];
    std::uint32_t zero[1];
    load_words(zeros, zero);
    load_words(scales, scale);
    const std::uint32_t power = Pair<T>::of(kAdded<T, kBits>);
    const std::uint32_t subtracted = zero[0] & subtracts_;
    std::uint32_t center = Pair<T>::plus(power, subtracted);
    if constexpr (std::is_same_v<T, Float16>) {
      center = Pair<T>::least(center, 0x7BFF7BFF);  // at most the largest finite number
    }
    // The rounding error of center, if the zero is not an integer.
    const std::uint32_t rest = Pair<T>::minus(Pair<T>::minus(center, power), subtracted);
    const std::uint32_t added = Pair<T>::multiply_add(rest, scale[0], zero[0] & ~subtracts_);
    PairFactors factors;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      factors.center[c] = Pair<T>::twice(center, c);
      factors.scale[c] = Pair<T>::twice(scale[0], c);
      factors.added[c] = Pair<T>::twice(added, c);
    }
    return factors;
  }

  std::uint32_t subtracts_;
};

// The same in float32.
template <class T, int kBits>
class FloatConverter {
 public:
  __device__ explicit FloatConverter(const Grids& grids) : grids_(grids) {}

  template <int kCount>
  __device__ void convert(std::uint32_t scales, std::uint32_t zeros, std::uint32_t (*fragments)[4]) const {
    const auto own = load_grids<T, kColumnsEach>(grids_, scales, zeros);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scale<T, kBits>(fragments[i], grids_.adds, own);
    }
  }

 private:
  const Grids& grids_;
};

}  // namespace mica::kernels::quantized_cuda
