#pragma once

// How rows of a matrix stream through the shared memory of a GPU (stream_cuda.cuh): who shares one, and what lies where
// in a block's shared memory.

#include <algorithm>
#include <cstdint>

namespace mica::kernels::rows {

/// Who shares a row: a warp or some of its lanes, a block, or the blocks of a cluster.
enum class Team { warp, block, cluster };

// Blocks in all: a number of its own and not the chip's, so that results do not depend on the chip.
constexpr int kStreamBlocks = 132;
// Where more than 2 blocks share a row, which must lie in one group of multiprocessors, an H200 has room for so many.
constexpr int kStreamClusterBlocks = 120;
constexpr int kStreamLargestClusterBlocks = 112;  // 16
constexpr int kStreamShared = 227 * 1024;         // bytes of shared memory that a block may have
constexpr int kMeetings = 4;  // of a group, used in turn: warps are up to two apart, and a row is begun ahead

struct StreamPlan {
  int packs = 0;         // of a row that a thread has; 0: rows of this length need another kernel
  int threads = 0;       // of a block that share a row
  int groups = 1;        // of so many threads, in a block
  int cluster = 1;       // blocks that share a row
  int slab = 0;          // columns of a row that a block has
  int kept_bytes = 0;    // of parameters kept in shared memory
  int stream_bytes = 0;  // of what streams

  constexpr int block() const { return threads * groups; }
  constexpr int warps() const { return threads / 32; }  // of a block that share a row
  constexpr int meeting_begin() const { return groups * kMeetings * (cluster > 1 ? 2 : 1) * 8; }
  constexpr int kept_begin() const {
    const int numbers = groups * kMeetings * 2 * (warps() + (cluster > 1 ? cluster : 0));
    return (meeting_begin() + numbers * 4 + 127) / 128 * 128;
  }
  constexpr int stream_begin() const { return (kept_begin() + kept_bytes + 127) / 128 * 128; }
  constexpr int shared_bytes() const { return stream_begin() + stream_bytes; }
  constexpr Team team() const { return cluster > 1 ? Team::cluster : threads <= 32 ? Team::warp : Team::block; }
};

/// How rows of some length are streamed.
struct StreamChoice {
  int packs;    // a thread; 0: rows of this length need another kernel
  int depth;    // chunks that the shared memory holds
  int cluster;  // blocks that share a row
};

/// So many columns a block, in whole warps of packs of V.
inline void divide(StreamPlan& p, std::int64_t columns, int V, int most_threads) {
  constexpr std::int64_t kUnit = 64;
  p.slab = static_cast<int>((columns + p.cluster * kUnit - 1) / (p.cluster * kUnit) * kUnit);
  const int warp_columns = p.packs * V * 32;
  p.threads = (p.slab + warp_columns - 1) / warp_columns * 32;
  p.groups = std::max(1, most_threads / p.threads);
}

/// Blocks, or clusters of them that share rows.
inline unsigned stream_teams(const StreamPlan& p, std::int64_t rows) {
  const int blocks = p.cluster <= 2   ? kStreamBlocks
                     : p.cluster <= 8 ? kStreamClusterBlocks
                                      : kStreamLargestClusterBlocks;
  return static_cast<unsigned>(std::min<std::int64_t>(blocks / p.cluster, (rows + p.groups - 1) / p.groups));
}

}  // namespace mica::kernels::rows
