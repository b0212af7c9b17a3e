#pragma once

// Rows that their threads hold in registers, P packs of V columns each: some lanes of a warp, a warp, or a block. A
// thread's packs lie a team's width apart.

#include <algorithm>
#include <cstdint>

#include <mica/ops/layer_norm/rows_cuda.cuh>

namespace mica::kernels::rows {

/// The sum over the threads of a row: over kLanes neighboring lanes or, if that is 0, over the block. `warps` has room
/// for a number of each warp, in shared memory, and is not used again.
template <int kLanes, class S>
__device__ S sum_threads(S mine, S* warps) {
  if constexpr (kLanes > 0) {
    return sum_lanes<kLanes>(mine);
  } else {
    const S warp = sum_lanes<kWarp>(mine);
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) {
      warps[threadIdx.x / kWarp] = warp;
    }
    __syncthreads();
    return sum_lanes<kWarp>(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : S(0));
  }
}

/// Threads of a block that share a row, at most `most_threads`: with `most` packs of V columns each or, if that leaves
/// fewer of them without one, with `fewer`.
template <int V>
int block_threads(std::int64_t columns, int most, int fewer, int most_threads) {
  const auto threads_with = [&](int packs) {
    const std::int64_t in_warp = std::int64_t{kWarp} * V * packs;
    return (columns + in_warp - 1) / in_warp * kWarp;
  };
  const std::int64_t of_most = threads_with(most);
  const std::int64_t of_fewer = threads_with(fewer);
  const bool better = of_fewer <= most_threads && of_fewer * fewer < of_most * most;
  return static_cast<int>(better ? of_fewer : std::min<std::int64_t>(of_most, most_threads));
}

/// Packs of V columns that each of so many threads has.
template <int V>
int packs_of(std::int64_t columns, int threads) {
  return static_cast<int>((columns + threads * V - 1) / (threads * V));
}

}  // namespace mica::kernels::rows
