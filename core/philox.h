#pragma once

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 128 random bits
// as a function of a 64-bit key and a 128-bit counter, on the CPU and on CUDA, with cuRAND's meaning of (seed,
// subsequence, offset). cuRAND's own device functions would compute more bits than needed.

#include <cmath>
#include <cstdint>

#include <mica/core/detail/philox_rounds.h>
#include <mica/core/half.h>
#include <mica/core/rng.h>

namespace mica {

/// Four words of subsequence `subsequence`, from key.offset on (a multiple of 4).
MICA_HOST_DEVICE inline PhiloxBlock philox_block(PhiloxKey key, std::uint64_t subsequence) {
#if defined(__CUDA_ARCH__)
  key = absolute_key(key);
#endif
  return philox_rounds<10>(key, subsequence);
}

/// Numbers from one block: 4 floats or 2 doubles. Element i of a tensor is number i % kPerBlock of subsequence i /
/// kPerBlock.
template <class T>
struct PhiloxReals;

template <>
struct PhiloxReals<float> {
  static constexpr int kPerBlock = 4;

  /// In (0, 1], as curand_uniform: bits · 2⁻³² + 2⁻³³, rounded to float.
  MICA_HOST_DEVICE static float uniform(const PhiloxBlock& block, int i) {
    return static_cast<float>(block.word[i]) * 0x1p-32f + 0x1p-33f;
  }

  /// Box and Muller (1958). Not curand_normal, whose fast sine has errors of thousands of ulp near its zeros.
  MICA_HOST_DEVICE static float normal(const PhiloxBlock& block, int i) {
    const float radius = sqrtf(-2.0f * logf(uniform(block, i & ~1)));
    const float angle = 6.2831853071795865f * uniform(block, i | 1);
    return radius * ((i & 1) == 0 ? sinf(angle) : cosf(angle));
  }
};

template <>
struct PhiloxReals<double> {
  static constexpr int kPerBlock = 2;

  /// In (0, 1], as curand_uniform2_double: 53 bits.
  MICA_HOST_DEVICE static double uniform(const PhiloxBlock& block, int i) {
    const std::uint64_t bits = block.word[2 * i] ^ (static_cast<std::uint64_t>(block.word[2 * i + 1]) << 21);
    return static_cast<double>(bits) * 0x1p-53 + 0x1p-54;
  }

  MICA_HOST_DEVICE static double normal(const PhiloxBlock& block, int i) {
    const double radius = ::sqrt(-2.0 * ::log(uniform(block, 0)));
    const double angle = 6.2831853071795865 * uniform(block, 1);
    return radius * (i == 0 ? ::sin(angle) : ::cos(angle));
  }
};

/// Maps a uniform number in (0, 1] to [0, 1): 1 becomes 0, also if rounding to T produced it.
template <class T, class Real>
MICA_HOST_DEVICE T half_open(Real uniform) {
  const T value = static_cast<T>(uniform);
  return static_cast<Real>(value) == Real{1} ? static_cast<T>(Real{0}) : value;
}

/// An integer in [0, range) from 64 random bits: the high word of a product, whose bias is below range / 2⁶⁴.
MICA_HOST_DEVICE inline std::uint64_t bounded(std::uint64_t bits, std::uint64_t range) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(bits, range);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(bits) * range) >> 64);
#endif
}

}  // namespace mica
