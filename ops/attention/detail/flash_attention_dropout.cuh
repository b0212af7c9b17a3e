#pragma once

// Dropout of weights that are in the register layout of tensor core accumulators: of a tile of 16 rows, lane l has rows
// l / 4 and l / 4 + 8, and of every 8 columns, columns 2 (l % 4) and 2 (l % 4) + 1. Rows are queries or, in the kernel
// for the gradients of keys and values, keys.
//
// A group of attention_dropout.h is split between lanes l and l ^ 4, whose rows are adjacent. Of two blocks of columns,
// the lane with the even row computes the bits of the first, the lane with the odd row those of the second, and they
// exchange halves.

#include <cstdint>

#include <mica/ops/attention/detail/attention_dropout.h>
#include <mica/ops/attention/detail/flash_attention_cuda.cuh>

namespace mica::kernels::flash {

/// Assembles a register from bytes of two others (PRMT). Each digit of the selector is a byte's index in (first,
/// second); adding 8 replicates the byte's sign bit instead.
__device__ inline std::uint32_t permute_bytes(std::uint32_t first, std::uint32_t second, unsigned selector) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(selector));
  return result;
}

/// Returns a bit for each of the lane's weights, 1 if it is kept, for a tile of 16 rows and kColumns columns (32 or 64)
/// from (row, column) on, multiples of 16 and 32. `head` counts query heads over all batches. Called by a whole warp.
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
    // plane & kept if the threshold's bit is 1, else plane | kept: see kept_of_dropout_group().
    kept = (plane & kept) | (plane & a.dropped_below[i]) | (kept & a.dropped_below[i]);
  }
  constexpr std::uint32_t kEven = kRowsAreQueries ? 0x0F0F0F0F : 0x33333333;
  constexpr unsigned kShift = kRowsAreQueries ? 4 : 2;
  const std::uint32_t own = odd ? ~kEven : kEven;
  const std::uint32_t sent = __funnelshift_l(kept, kept, odd ? kShift : 32 - kShift);
  const std::uint32_t received = __shfl_xor_sync(~0u, sent, 4);
  return (kept & own) | (received & ~own);
}

/// Which bit of draw_kept() belongs to the lane's accumulator i.
template <bool kRowsAreQueries>
__device__ constexpr int bit_of_sum(int i) {
  const int block = i / 8;
  const int row_half = i / 2 % 2;
  const int column_half = i / 4 % 2;
  const int byte = block / 2 * 2 + (kRowsAreQueries ? row_half : column_half);
  return byte * 8 + (kRowsAreQueries ? block % 2 * 4 + i % 2 * 2 + column_half : i % 2 * 4 + block % 2 * 2 + row_half);
}

/// The weight of accumulator i, or 0 if it is dropped, even if the weight is not finite.
template <bool kRowsAreQueries>
__device__ float keep(float weight, std::uint32_t kept, int i) {
  return (kept & 1u << bit_of_sum<kRowsAreQueries>(i)) != 0 ? weight : 0;
}

/// The same for a pair of weights rounded to 16 bits, of accumulators i and i + 1; i is even.
template <bool kRowsAreQueries>
__device__ std::uint32_t keep_pair(std::uint32_t pair, std::uint32_t kept, int i) {
  const int first = bit_of_sum<kRowsAreQueries>(i);
  const int second = bit_of_sum<kRowsAreQueries>(i + 1);  // in the same byte
  const unsigned byte = first / 8;
  // Shifts both bits to the sign bits of bytes and expands these to masks of 16 bits.
  return pair &
         permute_bytes(kept << (7 - first % 8), kept << (7 - second % 8), (byte | 0x8) * 0x11 + (byte | 0xC) * 0x1100);
}

/// The same for all pairs of a lane. Each register of `kept` covers 64 columns.
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
