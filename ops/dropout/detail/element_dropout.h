#pragma once

// Which elements are dropped: a function of the random key and of an element's index in row-major order alone, so that
// all kernels and both devices drop the same ones. Eight consecutive elements share one Philox block of 128 bits, since
// computing 32 bits per element would take longer than loading and storing it.

#include <cstdint>

#include <mica/core/detail/philox_rounds.h>
#include <mica/ops/dropout/detail/dropout_choice.h>

namespace mica {

/// Dropout of elements, which uses 16 random bits for each.
using ElementDropout = DropoutChoice<65536>;

namespace detail {

constexpr int kDropoutGroup = 8;  // elements that share a Philox block

/// The random bits of elements 8 · group to 8 · group + 7. The key is absolute (core/rng.h).
MICA_HOST_DEVICE inline PhiloxBlock draw_dropout_group(PhiloxKey key, std::uint64_t group) {
  return philox_rounds<7>(key, group);
}

/// Whether element i of a group is kept, that is, whether its 16-bit random number is at least the threshold.
MICA_HOST_DEVICE inline bool is_kept(const PhiloxBlock& bits, int i, std::uint32_t threshold) {
  const std::uint32_t word = bits.word[i / 2];
  return (i % 2 == 0 ? word << 16 : word) >= threshold << 16;  // lower bits do not affect the comparison
}

}  // namespace detail

}  // namespace mica
