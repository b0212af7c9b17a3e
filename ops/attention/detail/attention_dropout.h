#pragma once

// Which attention weights are dropped. It is a function of the random key and of the weight's position in (B · H, T, S)
// alone, so that all kernels, whatever their tiles, and both devices drop the same weights.
//
// A block of 16 queries and 16 keys is split into 16 groups (u, v) of 16 elements, for u and v from 0 to 3:
//
//             keys 0 … 7     keys 8 … 15          Of each quarter, 8 x 8, group (u, v) has 4 elements:
//           ┌──────────────┬──────────────┐
//     0 … 7 │   quarter    │   quarter    │                     key 2v    key 2v + 1
//   queries ├──────────────┼──────────────┤       query 2u         x          x
//    8 … 15 │   quarter    │   quarter    │       query 2u + 1     x          x
//           └──────────────┴──────────────┘
//
// Each element has a random number of 8 bits, and those of a group are the 128 bits of one Philox block. Bit i of all
// 16 numbers is one half of one of its words, so that one logical operation per bit compares all of them with the
// threshold.

#include <cstdint>

#include <mica/core/detail/philox_rounds.h>
#include <mica/ops/dropout/detail/dropout_choice.h>

namespace mica {

/// Dropout of attention weights, which uses 8 random bits for each.
using WeightDropout = DropoutChoice<256>;

namespace detail {

constexpr int kDropoutBlock = 16;  // queries, and keys, per block

/// The random bits of group (u, v) of a block. `row_of_blocks` is (b · H + h) · ⌈T / 16⌉ + ⌊t / 16⌋ for query t.
MICA_HOST_DEVICE inline PhiloxBlock draw_dropout_group(PhiloxKey key, std::uint32_t row_of_blocks,
                                                       std::uint32_t block_of_keys, std::uint32_t u, std::uint32_t v) {
  return philox_rounds<7>(key, (std::uint64_t{row_of_blocks} << 32) | (block_of_keys * 16 + u * 4 + v));
}

/// The query and the key, within their block, of an element (0 to 15) of group (u, v).
MICA_HOST_DEVICE constexpr int query_of_dropout_group(int u, int element) {
  return element / 8 * 8 + 2 * u + element / 4 % 2;
}
MICA_HOST_DEVICE constexpr int key_of_dropout_group(int v, int element) {
  return element % 2 * 8 + 2 * v + element / 2 % 2;
}

/// Bit i of the result says whether element i of a group is kept, that is, whether its number is at least the
/// threshold.
MICA_HOST_DEVICE inline std::uint32_t kept_of_dropout_group(const PhiloxBlock& bits, std::uint32_t threshold) {
  std::uint32_t kept = 0xFFFF;  // whether the bits seen so far, from the lowest one, are at least the threshold's
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t plane = bits.word[i / 2] >> (i % 2 * 16);
    kept = (threshold >> i & 1) != 0 ? plane & kept : plane | kept;
  }
  return kept & 0xFFFF;
}

}  // namespace detail

}  // namespace mica
