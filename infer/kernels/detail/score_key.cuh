#pragma once

#include <cstdint>

namespace mica::kernels {

/// Maps a score to an unsigned integer, so that integers have the order of the scores.
__device__ inline std::uint32_t score_key(float score) {
  const std::uint32_t bits = score == 0 ? 0 : __float_as_uint(score);  // -0 gets the key of +0
  return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

}  // namespace mica::kernels
