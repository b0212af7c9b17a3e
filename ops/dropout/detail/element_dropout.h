#pragma once

// The choice of dropped elements: a function of the key and of an element's index in row-major order alone, so that all
// kernels and both devices drop the same ones. Eight neighbors share the 128 bits of one Philox block: on a GPU,
// computing 32 bits per element would take longer than loading and storing it.

#include <cstdint>

#include <mica/core/philox_rounds.h>
#include <mica/ops/dropout/detail/dropout_choice.h>

namespace mica {

/// Dropped elements, by 16 random bits each.
using ElementDropout = DropoutChoice<65536>;

namespace detail {

constexpr int kDropoutGroup = 8;  // elements that share a Philox block

/// The random bits of elements 8 · group, …, 8 · group + 7. The key is absolute.
MICA_HOST_DEVICE inline PhiloxBlock draw_dropout_group(PhiloxKey key, std::uint64_t group) {
  return philox_rounds<7>(key, group);
}

/// Whether element i of the group is kept: its 16 bits, as a number, are at least the threshold.
MICA_HOST_DEVICE inline bool is_kept(const PhiloxBlock& bits, int i, std::uint32_t threshold) {
  const std::uint32_t word = bits.word[i / 2];
  return (i % 2 == 0 ? word << 16 : word) >= threshold << 16;  // the bits below the 16 do not affect the comparison
}

}  // namespace detail

}  // namespace mica
