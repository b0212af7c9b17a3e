#pragma once

// How a product is cut up for the tensor cores, and what of it lies where in shared memory. Included by
// many_rows_sm90.cu only.

namespace mica::kernels::quantized_cuda {

inline constexpr int kWarp = 32;
inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr int kConsumers = 2;       // warpgroups of a block that multiply; one more copies
inline constexpr int kConsumerThreads = kConsumers * kGroupThreads;
inline constexpr int kThreads = kConsumerThreads + kGroupThreads;
// Each copies every fourth stage. No fewer stages than these: a warp that waits for one to be free knows its turn by a
// parity, so must not be two turns ahead.
inline constexpr int kCopyWarps = kGroupThreads / kWarp;

inline constexpr int kStrip = 128;  // columns of a block
inline constexpr int kTile = 64;    // rows of the weight between two waits: what a line of 128 bytes holds of x
inline constexpr int kUnits = kTile / kUnit;
inline constexpr int kLine = 128;                // bytes of a row of x in a tile
inline constexpr int kAlignment = 1024;          // of tiles of x
inline constexpr int kFactorBytes = kStrip * 4;  // of the scales, or the zeros, of a strip
inline constexpr int kPitch = kStrip + 4;        // floats between rows of sums in shared memory: no bank conflicts
inline constexpr int kBlocksAtOnce = 132;        // times kBlocks. A constant, so that sums do not depend on the chip.
inline constexpr int kMostSplits = 16;

inline constexpr int kColumnsEach = 2;  // neighboring columns of a thread

// How a block of kRows rows of x works.
template <int kBits, int kRows>
struct Plan {
  static constexpr int kBlocks = kRows <= 64 ? 2 : 1;  // of a multiprocessor
  // A block is launched with registers for all of its threads alike. Those that copy give most of theirs away.
  static constexpr int kConsumerRegisters = kBlocks == 2 ? 104 : 224;
  static constexpr int kCopyRegisters = kBlocks == 2 ? 32 : 56;

  static constexpr int kWordRows = kTile * kBits / 32;                    // of a tile
  static constexpr int kWordPitch = kStrip * 4 + (kBits == 8 ? 16 : 32);  // bytes; no bank conflicts

  // A stage in shared memory, for one tile.
  static constexpr int kXBytes = kRows * kLine;
  static constexpr int kWordBytes = kWordRows * kWordPitch;
  static constexpr int kWordsAt = kXBytes;
  static constexpr int kFactorsAt = kWordsAt + kWordBytes;
  static constexpr int kStageBytes =
      (kFactorsAt + kUnits * 2 * kFactorBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kSumBytes = kRows * kPitch * 4;
  static constexpr int kRoom = (kBlocks == 2 ? 112 : 224) * 1024;
  static constexpr int kStages = kRoom / kStageBytes < 8 ? kRoom / kStageBytes : 8;
  static constexpr int kMemory = kStages * kStageBytes > kSumBytes ? kStages* kStageBytes : kSumBytes;
  static constexpr int kBytes = kMemory + (2 * kStages + 1) * 8;  // and barriers, and a flag
  static_assert(kStages >= kCopyWarps && kBytes <= 227 * 1024);
};

}  // namespace mica::kernels::quantized_cuda
