#pragma once

// Who shares a row on CUDA, as plain numbers: see row_team_cuda.cuh.

#include <algorithm>
#include <cstdint>

namespace mica::kernels::held {

/// Who shares a row: some lanes of a warp or all, a block, or a cluster of blocks.
enum class Team { warp, block, cluster };

constexpr int kWarpRows = 8;           // warps of a block that have rows of their own
constexpr int kMostTeamThreads = 512;  // of a block that share a row
constexpr int kMostCluster = 16;       // blocks

/// Where a row is from the one time it is read until its results are written.
enum class Held {
  nowhere,    // it is too long, and read twice
  registers,  // of its threads
  streamed,   // the same, by blocks that stay for row after row
  shared_memory,
};

/// How rows of some length are held.
struct RowPlan {
  Held held = Held::nowhere;
  Team team = Team::block;
  int pack = 0;         // columns that a thread reads at once
  int elements = 0;     // of a row that a thread holds in registers, at most
  bool packed = false;  // two 16-bit elements to a register
  int threads = 0;      // of a block that share a row
  int rows = 1;         // of a block
  int cluster = 1;      // blocks that share a row
  int slab = 0;         // columns of a row that a block has

  bool operator==(const RowPlan&) const = default;
};

}  // namespace mica::kernels::held
