#pragma once

// Which kernel computes a norm, and with how many threads: a function of the shape, the dtypes and the chip alone.

#include <cstdint>

#include <mica/core/dtype.h>

namespace mica::kernels {

/// What a plan depends on.
struct NormShape {
  std::int64_t rows;
  std::int64_t columns;
  DType x;
  DType weight;     // and bias
  bool parameters;  // weight and, if centered, bias are there
  bool centered;    // a layer norm
  bool adds;        // normalizes a sum that it writes
  bool packed;      // rows can be read in packs of 16 bytes
  bool clusters;    // the chip has compute capability 9.0
  int multiprocessors;
};

/// Who shares a row: some lanes of a warp, a warp, a block or a cluster.
enum class RowTeam { lanes, warp, block, cluster };

constexpr int kForwardBlock = 512;   // threads of a block, at most
constexpr int kSharingBlock = 1024;  // of one whose rows share parameters in shared memory
constexpr int kTileWarps = 4;        // of a block whose warps have tiles of rows
constexpr int kTileDepth = 3;        // tiles of a warp in shared memory

struct NormForwardPlan {
  enum class Kernel { held, tiles, stream, looped };
  Kernel kernel = Kernel::looped;
  RowTeam team = RowTeam::block;
  int pack = 1;        // columns of a pack
  int packs = 0;       // of a row that a thread has
  int threads = 0;     // of a block that share a row
  int teams = 1;       // of so many threads, in a block
  int blocks = 1;      // that share a row
  int slab = 0;        // columns of a row that a block has
  bool stays = false;  // held: a team has row after row, the next one on its way, the parameters in shared memory
  bool few = false;    // held: all blocks have room at a time, and for the parameters in registers
  int tile_rows = 0;   // of a tile
  int tile_bytes = 0;  // that it takes of shared memory
};

NormForwardPlan norm_forward_plan(const NormShape& shape);

}  // namespace mica::kernels
