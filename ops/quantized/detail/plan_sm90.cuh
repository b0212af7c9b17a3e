#pragma once

// How the kernel for many rows divides a product, and its layout of shared memory. Included by many_rows_sm90.cu only.

#include <algorithm>

#include <mica/ops/quantized/detail/product_cuda.cuh>

namespace mica::kernels::quantized_cuda {

inline constexpr int kWarp = 32;
inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr int kConsumers = 2;       // consumer warpgroups per block; one more is the producer
inline constexpr int kConsumerThreads = kConsumers * kGroupThreads;
inline constexpr int kThreads = kConsumerThreads + kGroupThreads;
// Every thread of a block starts with the same number of registers; then the producer gives most of its own to the
// consumers.
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kCopyRegisters = 24;

inline constexpr int kStrip = 128;  // columns per block
inline constexpr int kTile = 64;    // rows of the weight per tile; so a row of x has 128 bytes, a swizzled line
inline constexpr int kUnits = kTile / kUnit;
inline constexpr int kLine = 128;                // bytes of a row of x in a tile
inline constexpr int kAlignment = 1024;          // of tiles of x in shared memory, in bytes
inline constexpr int kWordPitch = kStrip * 4;    // bytes from one row of words to the next
inline constexpr int kFactorBytes = kStrip * 4;  // bytes of the scales, or the zeros, of a unit
inline constexpr int kPitch = kStrip + 4;        // floats from one row of sums to the next; no bank conflicts
inline constexpr int kBlocksAtOnce = 132;        // a constant, so that sums do not depend on the GPU
inline constexpr int kMaxSplits = 16;

// The parameters of a block with kRows rows of x.
template <int kBits, int kRows>
struct BlockPlan {
  static constexpr int kWordRows = kTile * kBits / 32;  // rows of words per tile

  // A stage in shared memory, for one tile.
  static constexpr int kXBytes = kRows * kLine;
  static constexpr int kWordBytes = kWordRows * kWordPitch;
  static constexpr int kWordsAt = kXBytes;
  static constexpr int kScalesAt = kWordsAt + kWordBytes;
  static constexpr int kZerosAt = kScalesAt + kUnits * kFactorBytes;
  static constexpr int kStageBytes = (kZerosAt + kUnits * kFactorBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kSumBytes = kRows * kPitch * 4;
  static constexpr int kStages = std::min((224 << 10) / kStageBytes, 32);
  static constexpr int kMemory = std::max(kStages * kStageBytes, kSumBytes);
  static constexpr int kBytes = kMemory + (2 * kStages + 1) * 8;  // including barriers and a flag
  static_assert(kBytes <= 227 * 1024);
};

}  // namespace mica::kernels::quantized_cuda
