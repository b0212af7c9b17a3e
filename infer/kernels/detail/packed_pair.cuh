#pragma once

// Unpacks integers of packed weights in the kernels of a decoder's step.

#include <cstdint>
#include <type_traits>

#include <mica/core/dtype.h>

namespace mica::kernels {

/// What packed_pair() adds to its integers.
template <class T, int kBits>
inline constexpr float kPackedAdded = std::is_same_v<T, Float16> ? 1024
                                      : kBits == 4               ? 128
                                                                 : 0;

/// Returns integers c and c + 4 of 8 consecutive ones as a pair of T, each plus kPackedAdded.
template <class T, int kBits>
__device__ inline std::uint32_t packed_pair(const std::uint32_t (&octet)[kBits / 4], int c) {
  constexpr bool kIsHalf = std::is_same_v<T, Float16>;
  constexpr std::uint32_t kPower = kIsHalf ? 0x64006400 : 0x43004300;
  if constexpr (kBits == 4) {
    return ((octet[0] >> (4 * c)) & 0x000f000f) | kPower;
  } else if constexpr (kIsHalf) {
    return (__byte_perm(octet[0], octet[1], 0x0400 | (c << 8) | c) & 0x00ff00ff) | kPower;
  } else {
    // Converts to float32, whose upper half is the exact bfloat16, since the integer has only 8 bits.
    const auto number = [&](std::uint32_t word) {
      return __float_as_uint(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 | c)) - 8388608.0f);
    };
    return __byte_perm(number(octet[0]), number(octet[1]), 0x7632);
  }
}

}  // namespace mica::kernels
