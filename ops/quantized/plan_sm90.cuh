#pragma once

// How a product is cut up for the tensor cores, and what of it lies where in shared memory. Included by
// quantized_sm90.cu only.

namespace mica::kernels::quantized_cuda {

inline constexpr int kWarp = 32;
inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr int kConsumers = 2;       // warpgroups of a block that multiply; one more copies
inline constexpr int kConsumerThreads = kConsumers * kGroupThreads;
inline constexpr int kThreads = kConsumerThreads + kGroupThreads;

inline constexpr int kStrip = 128;  // columns of a block
inline constexpr int kUnit = 32;    // rows of the weight that lie in one group; a thread has 8 of them in a column
inline constexpr int kTile = 64;    // rows of the weight between two waits: what a line of 128 bytes holds of x
inline constexpr int kUnits = kTile / kUnit;
inline constexpr int kLine = 128;                // bytes of a row of x in a tile
inline constexpr int kAlignment = 1024;          // of tiles of x
inline constexpr int kFactorBytes = kStrip * 4;  // of the scales, or the zeros, of a strip
inline constexpr int kPitch = kStrip + 4;        // floats between rows of sums in shared memory: no bank conflicts
inline constexpr int kBlocksAtOnce = 132;        // times kBlocks. A constant, so that sums do not depend on the chip.
inline constexpr int kMostSplits = 16;

// How a block of kRows rows of x works.
template <int kBits, int kRows>
struct Plan {
  /// Few rows: the integers are multiplied, exactly, and the sums of a group scaled. Many: each weight is scaled and
  /// rounded, because scaling the sums would take longer.
  static constexpr bool kScalesSums = kRows <= 16;
  static constexpr int kHalves = kScalesSums ? 2 : 1;  // pieces of 64 columns of a warpgroup
  static constexpr int kParts = kHalves;               // whole strips: the warpgroups take turns along K
  static constexpr int kColumnsEach = 2 * kHalves;     // neighboring columns of a thread
  static constexpr int kBlocks = kRows <= 64 ? 2 : 1;  // of a multiprocessor
  // A block is launched with registers for all of its threads alike. Those that copy give most of theirs away.
  static constexpr int kConsumerRegisters = kBlocks == 2 ? 104 : 224;
  static constexpr int kCopyRegisters = kBlocks == 2 ? 32 : 56;

  static constexpr int kWordRows = kTile * kBits / 32;                    // of a tile
  static constexpr int kWordPitch = kStrip * 4 + (kBits == 8 ? 16 : 32);  // bytes; no bank conflicts

  // A stage in shared memory: kParts tiles of each.
  static constexpr int kXBytes = kParts * kRows * kLine;
  static constexpr int kXSumBytes = kScalesSums ? kParts * kUnits * kRows * 4 : 0;
  static constexpr int kWordBytes = kParts * kWordRows * kWordPitch;
  static constexpr int kXSumsAt = kXBytes;
  static constexpr int kWordsAt = kXSumsAt + kXSumBytes;
  static constexpr int kFactorsAt = kWordsAt + kWordBytes;
  static constexpr int kStageBytes =
      (kFactorsAt + kParts * kUnits * 2 * kFactorBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kSumBytes = kParts * kRows * kPitch * 4;
  static constexpr int kRoom = (kBlocks == 2 ? 112 : 224) * 1024;
  static constexpr int kStages = kRoom / kStageBytes < 8 ? kRoom / kStageBytes : 8;
  static constexpr int kMemory = kStages * kStageBytes > kSumBytes ? kStages* kStageBytes : kSumBytes;
  static constexpr int kBytes = kMemory + (2 * kStages + 1) * 8;  // and barriers, and a flag
  static_assert(kStages >= 2 && kBytes <= 227 * 1024);
};

}  // namespace mica::kernels::quantized_cuda
