#pragma once

// How rows of a matrix stream through shared memory (stream_cuda.cuh): which threads share a row, and the layout of a
// block's shared memory.

#include <algorithm>
#include <cstdint>

#include <mica/ops/detail/row_team.h>

namespace mica::kernels::rows {

// Blocks of the grid: a fixed number, and not the chip's number of multiprocessors, so that results do not depend on
// the chip.
constexpr int kStreamBlocks = 132;
// The same for clusters of 3 to 8 blocks, and of 16: the most that run at once on an H200. The blocks of a cluster must
// lie in one GPC, so that some multiprocessors remain unused.
constexpr int kStreamClusterBlocks = 120;
constexpr int kStreamLargestClusterBlocks = 112;
constexpr int kStreamShared = 227 * 1024;  // bytes of shared memory that a block may have
// Slots of a Meeting, which rows use cyclically. Several are needed, since warps may be up to two rows apart, and may
// have begun the next row already.
constexpr int kMeetings = 4;

struct StreamPlan {
  int packs = 0;         // of a row, per thread; 0: rows of this length need another kernel
  int threads = 0;       // per block, that share a row
  int groups = 1;        // groups of `threads` threads in a block
  int cluster = 1;       // blocks that share a row
  int slab = 0;          // columns of a row per block
  int kept_bytes = 0;    // of shared memory, for parameters
  int stream_bytes = 0;  // of shared memory, for the rows in flight
  // For rows that begin and end inside packs (EdgePlace):
  int sector = 0;       // elements; a row's first pack begins where a sector does. 0: rows consist of whole packs
  int phases = 1;       // the number of places in a sector at which rows begin; row i begins like row i mod phases
  bool sorted = false;  // whether teams get runs of rows that are sorted by these places

  constexpr int block() const { return threads * groups; }
  constexpr int warps() const { return threads / 32; }  // per block, that share a row
  constexpr int meeting_begin() const { return groups * kMeetings * (cluster > 1 ? 2 : 1) * 8; }
  constexpr int kept_begin() const {
    const int numbers = groups * kMeetings * 2 * (warps() + (cluster > 1 ? cluster : 0));
    return (meeting_begin() + numbers * 4 + 127) / 128 * 128;
  }
  constexpr int stream_begin() const { return (kept_begin() + kept_bytes + 127) / 128 * 128; }
  constexpr int shared_bytes() const { return stream_begin() + stream_bytes; }
  constexpr Team team() const { return cluster > 1 ? Team::cluster : threads <= 32 ? Team::warp : Team::block; }
};

/// Divides `columns` among the blocks of p's cluster, and a block's part among whole warps with p.packs packs of V
/// columns per thread.
inline void divide(StreamPlan& p, std::int64_t columns, int V, int most_threads) {
  constexpr std::int64_t kUnit = 64;
  p.slab = static_cast<int>((columns + p.cluster * kUnit - 1) / (p.cluster * kUnit) * kUnit);
  const int warp_columns = p.packs * V * 32;
  p.threads = (p.slab + warp_columns - 1) / warp_columns * 32;
  p.groups = std::max(1, most_threads / p.threads);
}

/// The number of blocks of the grid, in clusters of `cluster` blocks, if there are rows enough.
constexpr int stream_blocks(int cluster) {
  return cluster <= 2 ? kStreamBlocks : cluster <= 8 ? kStreamClusterBlocks : kStreamLargestClusterBlocks;
}

/// The number of teams to launch: blocks, or clusters.
inline unsigned stream_teams(const StreamPlan& p, std::int64_t rows) {
  const int teams = stream_blocks(p.cluster) / p.cluster;
  return static_cast<unsigned>(std::min<std::int64_t>(teams, (rows + p.groups - 1) / p.groups));
}

}  // namespace mica::kernels::rows
