#pragma once

// Streamed rows: the sizes of the kernel, and which rows and columns a thread has.
//
// A block has blockDim.y row groups of blockDim.x threads, which process rows first, first + step, …. If a row is too
// long for a block, the blocks of a cluster share it, and each has a slab of its columns. In shared memory, each group
// has D rows, or slabs, which are in use or being copied.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// A thread's rows, and its packs of them: first_pack, first_pack + kLanes, …. If a warp has several rows, these are
/// adjacent, and kLanes neighboring lanes share each of them.
template <Group kGroup, int kLanes = kWarp>
struct StreamThread {
  int rank;                                          // the block's, among those that share a row
  int columns;                                       // in the block's slab
  std::int64_t begin;                                // the slab's first column
  int first_pack;                                    // the thread's first pack, counted from the slab's beginning
  int packs;                                         // how many the thread has
  std::int64_t first;                                // the thread's first row
  std::int64_t warp_first;                           // the warp's first row
  std::int64_t step;                                 // from a row to the thread's next one
  static constexpr int kNeighbors = kWarp / kLanes;  // rows of a warp

  __device__ StreamThread(const StreamPlan& p, std::int64_t row_columns, int pack_columns, int most_packs) {
    rank = block_rank();
    begin = kGroup == Group::cluster ? std::int64_t{rank} * p.slab : 0;
    const std::int64_t left = row_columns - begin;
    columns = static_cast<int>(left < 0 ? 0 : left < p.slab ? left : p.slab);
    const int lane = threadIdx.x % kLanes;
    first_pack = threadIdx.x / kLanes * (most_packs * kLanes) + lane;
    const int packs_left = (columns / pack_columns - first_pack + kLanes - 1) / kLanes;
    packs = packs_left < 0 ? 0 : packs_left < most_packs ? packs_left : most_packs;
    first = first_row(p, threadIdx.y);
    warp_first = first - threadIdx.y % kNeighbors;
    step = cluster_count(p) * blockDim.y;
  }

  /// The first row of a group of the block.
  __device__ static std::int64_t first_row(const StreamPlan& p, int group) {
    return (group / kNeighbors * cluster_count(p) + cluster_index(p)) * kNeighbors + group % kNeighbors;
  }

  __device__ static int cluster_count(const StreamPlan& p) {
    return gridDim.x / (kGroup == Group::cluster ? p.cluster : 1);
  }
  __device__ static int cluster_index(const StreamPlan& p) {
    return blockIdx.x / (kGroup == Group::cluster ? p.cluster : 1);
  }
  __device__ static int block_rank() { return kGroup == Group::cluster ? cuda::cluster_rank() : 0; }
};

/// The sizes of a kernel that streams rows, in packs of V columns.
template <int V_, StreamKernel kKernel>
struct StreamShape {
  static constexpr int V = V_;
  static constexpr int P = kKernel.packs;
  static constexpr Group kGroup = kKernel.group;
  static constexpr int kLanes = kKernel.lanes;
  static constexpr int D = kKernel.depth;
  using Thread = StreamThread<kGroup, kLanes>;
};

}  // namespace mica::kernels::norm_cuda
