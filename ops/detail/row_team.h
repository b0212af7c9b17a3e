#pragma once

// How CUDA threads share rows, as plain numbers that the host computes: see row_team_cuda.cuh.

#include <cstdint>

namespace mica::kernels {

/// The threads that share a row: some lanes of a warp, a warp, a thread block, or a cluster of blocks. Where the number
/// of lanes is a separate argument, a part of a warp is a `warp`, too.
enum class Team { lanes, warp, block, cluster };

// Blocks of a persistent grid: a fixed number, and not the chip's number of multiprocessors, so that results do not
// depend on the chip.
constexpr int kPersistentBlocks = 132;
// The same for clusters of 3 to 8 blocks, and of 16: the most that run at once on an H200. The blocks of a cluster must
// lie in one GPC, so that some multiprocessors remain unused.
constexpr int kPersistentClusterBlocks = 120;
constexpr int kPersistentLargestClusterBlocks = 112;

/// The number of blocks of a persistent grid of clusters of `cluster` blocks, if there are rows enough.
constexpr int persistent_blocks(int cluster) {
  return cluster <= 2 ? kPersistentBlocks : cluster <= 8 ? kPersistentClusterBlocks : kPersistentLargestClusterBlocks;
}

}  // namespace mica::kernels

namespace mica::kernels::held {

constexpr int kWarpRows = 8;           // warps per block, if each has rows of its own
constexpr int kMostTeamThreads = 512;  // per block, if they share a row
constexpr int kMostCluster = 16;       // blocks per cluster

/// Where a row is kept between reading it and writing its results.
enum class Held {
  nowhere,    // it is too long, and is read twice
  registers,  // of its threads
  streamed,   // in registers, too, but each block stays on its multiprocessor and processes row after row
  shared_memory,
};

/// How rows of a given length are held, and by how many threads.
struct RowPlan {
  Held held = Held::nowhere;
  Team team = Team::block;
  int pack = 0;         // columns that a thread reads at once
  int elements = 0;     // the most elements of a row that a thread holds in registers
  bool packed = false;  // whether a register holds two 16-bit elements
  int threads = 0;      // per block, that share a row
  int rows = 1;         // per block
  int cluster = 1;      // blocks that share a row
  int slab = 0;         // columns of a row per block
  int ahead = 0;        // if streamed, how many rows are copied ahead of their use

  bool operator==(const RowPlan&) const = default;
};

}  // namespace mica::kernels::held
