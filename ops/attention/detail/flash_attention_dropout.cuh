#pragma once

// Dropout of weights in the register layout of the tensor cores' sums: lane l has rows l / 4 and l / 4 + 8 of
// 16, and columns 2 (l % 4) and the next of each 8. Rows are queries or, for the gradients of keys and values,
// keys.
//
// A group of attention_dropout.h is split between lanes l and l ^ 4, whose rows are neighbors. For two blocks of
// columns, the lane with the even row draws the bits of the first block, the lane with the odd row those of the second,
// and they exchange halves: no bit is drawn twice or unused.

#include <cstdint>

#include <mica/ops/attention/detail/attention_dropout.h>
#include <mica/ops/attention/detail/flash_attention_cuda.cuh>

namespace mica::kernels::flash {

/// Selects bytes of two registers: 0 to 3 of the first, 4 to 7 of the second; adding 8 replicates their sign bit.
__device__ inline std::uint32_t permute_bytes(std::uint32_t first, std::uint32_t second, unsigned selector) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(selector));
  return result;
}

/// A bit for each of a lane's weights, 1 if kept, in 16 rows from `row` and kColumns columns (32 or 64) from `column`
/// on; row is a multiple of 16, column of 32. `head` counts query heads over all batches. Called by a whole warp.
template <bool kRowsAreQueries, int kColumns>
__device__ std::uint32_t draw_kept(const Work& a, const PhiloxKey& key, int head, int row, int column) {
  static_assert(kColumns == 32 || kColumns == 64);
  const unsigned lane = threadIdx.x % 32;
  const bool odd = lane / 4 % 2 != 0;
  const unsigned row_pair = lane / 8;
  const unsigned column_pair = lane % 4;
  PhiloxBlock bits[2];
#pragma unroll
  for (int i = 0; i < kColumns / 32; ++i) {
    const unsigned row_block = row / detail::kDropoutBlock;
    const unsigned column_block = column / detail::kDropoutBlock + 2 * i + (odd ? 1 : 0);
    const unsigned first_of_head = head * ((a.queries + detail::kDropoutBlock - 1) / detail::kDropoutBlock);
    bits[i] = kRowsAreQueries
                  ? detail::draw_dropout_group(key, first_of_head + row_block, column_block, row_pair, column_pair)
                  : detail::draw_dropout_group(key, first_of_head + column_block, row_block, column_pair, row_pair);
  }
  std::uint32_t kept = ~0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t first = bits[0].word[i / 2];
    std::uint32_t plane;
    if constexpr (kColumns == 64) {
      const std::uint32_t second = bits[1].word[i / 2];
      plane = i % 2 == 0 ? permute_bytes(first, second, 0x5410) : permute_bytes(first, second, 0x7632);
    } else {
      plane = first >> (i % 2 * 16);
    }
    // `and` if the threshold's bit is set, else `or`: see kept_of_dropout_group().
    kept = (plane & kept) | (plane & a.dropped_below[i]) | (kept & a.dropped_below[i]);
  }
  constexpr std::uint32_t kEven = kRowsAreQueries ? 0x0F0F0F0F : 0x33333333;
  constexpr unsigned kShift = kRowsAreQueries ? 4 : 2;
  const std::uint32_t own = odd ? ~kEven : kEven;
  const std::uint32_t sent = __funnelshift_l(kept, kept, odd ? kShift : 32 - kShift);
  const std::uint32_t received = __shfl_xor_sync(~0u, sent, 4);
  return (kept & own) | (received & ~own);
}

/// The bit of draw_kept() for sum i of a lane.
template <bool kRowsAreQueries>
__device__ constexpr int bit_of_sum(int i) {
  const int block = i / 8;
  const int row_half = i / 2 % 2;
  const int column_half = i / 4 % 2;
  const int byte = block / 2 * 2 + (kRowsAreQueries ? row_half : column_half);
  return byte * 8 + (kRowsAreQueries ? block % 2 * 4 + i % 2 * 2 + column_half : i % 2 * 4 + block % 2 * 2 + row_half);
}

/// 0 for a dropped weight, even if it is not finite.
template <bool kRowsAreQueries>
__device__ float keep(float weight, std::uint32_t kept, int i) {
  return (kept & 1u << bit_of_sum<kRowsAreQueries>(i)) != 0 ? weight : 0;
}

/// The same for sums i and i + 1, rounded to 16 bits; i is even.
template <bool kRowsAreQueries>
__device__ std::uint32_t keep_pair(std::uint32_t pair, std::uint32_t kept, int i) {
  const int first = bit_of_sum<kRowsAreQueries>(i);
  const int second = bit_of_sum<kRowsAreQueries>(i + 1);  // of the same byte
  const unsigned byte = first / 8;
  // Move both bits to the signs of their bytes, and expand these to masks of the halves.
  return pair &
         permute_bytes(kept << (7 - first % 8), kept << (7 - second % 8), (byte | 0x8) * 0x11 + (byte | 0xC) * 0x1100);
}

/// The same for all of a lane's pairs; each register of `kept` covers 64 columns.
template <bool kRowsAreQueries, int kColumns>
__device__ void drop_rounded(std::uint32_t (&weights)[kColumns / 16][4], const std::uint32_t* kept) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[k][i] = keep_pair<kRowsAreQueries>(weights[k][i], kept[k / 4], k % 4 * 8 + i * 2);
    }
  }
}

}  // namespace mica::kernels::flash
