#pragma once

// Chooses the CUDA kernel of a norm's forward, and how many threads share a row. The choice is a pure function of
// NormShape.

#include <algorithm>
#include <cstdint>

#include <mica/core/dtype.h>
#include <mica/ops/detail/row_team.h>

namespace mica::kernels {

/// Everything that a plan depends on.
struct NormShape {
  std::int64_t rows;
  std::int64_t columns;
  DType x;
  DType weight;     // of weight and bias
  bool parameters;  // whether weight and, if centered, bias are defined
  bool centered;    // layer norm; else RMS norm
  bool adds;        // whether a sum is computed, written and normalized
  bool packed;      // whether rows can be accessed in packs of 16 bytes
  int alignment;    // of x and y, even if not of all of their rows, in bytes; at most 16
  bool clusters;    // whether the GPU has thread block clusters (compute capability 9.0)
  int multiprocessors;
};

constexpr int kForwardBlock = 512;   // the most threads per block
constexpr int kSharingBlock = 1024;  // the same, if the rows of a block share parameters in shared memory
constexpr int kShortBlock = 128;     // threads per block in the kernel for short rows

/// How many of its P packs a lane may lack in the kernel for short rows, which tests only for the last ones.
constexpr int most_empty_packs(int pack_bytes, int packs) {
  return pack_bytes == 16 ? 1 : packs > (pack_bytes == 4 ? 8 : 16) ? 4 : std::min(packs, 2);
}

/// How many rows a team in the kernel for short rows computes at once, if there are many rows: several, if a lane has
/// little of each.
constexpr int most_rows_per_step(int pack_bytes, int pack, int packs) {
  return pack_bytes < 16 ? pack : packs == 1 ? 4 : packs == 2 ? 2 : 1;
}

struct NormForwardPlan {
  enum class Kernel { short_rows, held, looped };
  Kernel kernel = Kernel::looped;
  Team team = Team::block;
  int pack = 1;        // columns per pack
  int packs = 0;       // of a row, per thread
  int threads = 0;     // per block, that share a row
  int teams = 1;       // groups of `threads` threads per block
  int blocks = 1;      // that share a row
  int slab = 0;        // columns of a row per block
  bool edges = false;  // held: rows may begin and end inside packs
  bool stays = false;  // held: blocks are persistent, and load the next row while they compute the current one
  bool few = false;    // all blocks run at once: held ones with the parameters in registers, short ones with a single
                       // row per team
};

NormForwardPlan norm_forward_plan(const NormShape& shape);

}  // namespace mica::kernels
