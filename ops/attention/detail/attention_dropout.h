#pragma once

// The choice of dropped attention weights: a function of the key and of an element's position in (B · H, T, S) alone,
// so that all kernels, with any tiles, and both devices drop the same weights.
//
// A block of 16 queries and 16 keys is split into 16 groups. A group has 16 elements: those of queries 2u and 2u + 1
// and keys 2v and 2v + 1 of each quarter of the block, 8 by 8. Their 8-bit random numbers consist of the 128 bits of
// one Philox block: bit i of all 16 is a half of one of its words. One logical operation per bit thus decides for all
// elements of a register at once. The lanes of a warp hold scores of such a group in two neighboring rows, whether rows
// are queries or keys (flash_attention_dropout.cuh).

#include <cstdint>

#include <mica/core/philox_rounds.h>
#include <mica/ops/dropout/detail/dropout_choice.h>

namespace mica {

/// Dropped weights of attention, by 8 random bits each.
using WeightDropout = DropoutChoice<256>;

namespace detail {

constexpr int kDropoutBlock = 16;  // queries and keys of a block

/// The random bits of group (u, v) of a block; `row_of_blocks`: (b · H + h) · ⌈T / 16⌉ + ⌊t / 16⌋.
MICA_HOST_DEVICE inline PhiloxBlock draw_dropout_group(PhiloxKey key, std::uint32_t row_of_blocks,
                                                       std::uint32_t block_of_keys, std::uint32_t u, std::uint32_t v) {
  return philox_rounds<7>(key, (std::uint64_t{row_of_blocks} << 32) | (block_of_keys * 16 + u * 4 + v));
}

/// The query and the key, within a block of 16, at place 0 to 15 of group (u, v).
MICA_HOST_DEVICE constexpr int query_of_dropout_group(int u, int place) {
  return place / 8 * 8 + 2 * u + place / 4 % 2;
}
MICA_HOST_DEVICE constexpr int key_of_dropout_group(int v, int place) { return place % 2 * 8 + 2 * v + place / 2 % 2; }

/// Bit i of the result: whether the element at place i is kept, that is, whether its number is at least the threshold.
MICA_HOST_DEVICE inline std::uint32_t kept_of_dropout_group(const PhiloxBlock& bits, std::uint32_t threshold) {
  std::uint32_t kept = 0xFFFF;  // comparison of the bits so far, from the lowest one: at least the threshold's
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t plane = bits.word[i / 2] >> (i % 2 * 16);
    kept = (threshold >> i & 1) != 0 ? plane & kept : plane | kept;
  }
  return kept & 0xFFFF;
}

}  // namespace detail

}  // namespace mica
