#pragma once

// How the threads that hold a row combine their moments: by shuffles, through the shared memory of a block, or through
// that of all blocks of a cluster.

#include <type_traits>

#include <mica/ops/norm/detail/norm_forward_held_shape_cuda.cuh>

namespace mica::kernels::norm_cuda {

// Combines the moments of a team's threads into those of their row, with the same bits in each thread. This template
// serves teams of one warp or a part of it.
template <class H, Team kTeam = H::kTeam>
class TeamMeeting {
  using S = typename H::S;

 public:
  struct Shared {};

  __device__ TeamMeeting(Shared&, const NormForwardPlan&) {}

  /// Returns the sums of both numbers. If not kBoth, the first sum is not needed, and may be missing.
  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, const Place<H>&) const {
    if constexpr (H::kLanes < kWarp) {
      return {kBoth ? sum_lanes<H::kLanes>(mine.a) : mine.a, sum_lanes<H::kLanes>(mine.b)};
    } else {
      const S sums = sum_pair(mine.a, mine.b);
      return {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2)};
    }
  }

  /// Combines moments of two passes.
  __device__ Moments<S> combine(const Moments<S>& mine, const Place<H>& place, S in_row) const {
    return combine_lanes<H::kLanes>(mine, static_cast<S>(place.elements()), in_row);
  }
};

// A warp's moments of two passes.
template <class H, class S = typename H::S>
__device__ Moments<S> combine_warp(const Moments<S>& mine, const Place<H>& place) {
  const S count = static_cast<S>(place.elements());
  const S warp_count = static_cast<S>(__reduce_add_sync(kAllLanes, place.elements()));
  return combine_lanes<kWarp>(mine, count, reciprocal(warp_count));
}

// The same for the warps that share one of the block's rows: all its warps or, if kShares, some of them.
template <class H>
class TeamMeeting<H, Team::block> {
  using S = typename H::S;

 public:
  struct Shared {
    Moments<S> moments[H::kStays ? 2 : 1][H::kMostThreads / kWarp];  // rows take turns
  };

  __device__ TeamMeeting(Shared& shared, const NormForwardPlan&)
      : shared_(shared), first_(H::kShares ? threadIdx.y * warps() : 0) {}

  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, const Place<H>&) {
    const Moments<S>* const all = meet(sum_pair(mine.a, mine.b));
    const int lane = threadIdx.x % kWarp;
    S sum = 0;
    if (lane % (kWarp / 2) < warps()) {
      const Moments<S>& other = all[lane % (kWarp / 2)];
      sum = lane < kWarp / 2 ? other.a : other.b;
    }
    sum = sum_lanes<kWarp / 2>(sum);
    return {__shfl_sync(kAllLanes, sum, 0), __shfl_sync(kAllLanes, sum, kWarp / 2)};
  }

  __device__ Moments<S> combine(const Moments<S>& mine, const Place<H>& place, S in_row) {
    constexpr int kWarpColumns = H::P * kWarp * H::V;
    const Moments<S> warp = combine_warp<H>(mine, place);
    const int lane = threadIdx.x % kWarp;
    const Moments<S>* const all = meet(lane < kWarp / 2 ? warp.a : warp.b);
    const Moments<S> other = lane < warps() ? all[lane] : Moments<S>{0, 0};
    const int count = lane < warps() ? max(0, min(kWarpColumns, place.columns - lane * kWarpColumns)) : 0;
    return combine_lanes<kWarp>(other, static_cast<S>(count), in_row);
  }

 private:
  __device__ static int warps() { return blockDim.x / kWarp; }

  // Leaves a warp's moments, and returns those of all warps. `mine` is a in the lower 16 lanes and b in the upper ones.
  __device__ const Moments<S>* meet(S mine) {
    Moments<S>* const all = shared_.moments[turn_] + first_;
    const int lane = threadIdx.x % kWarp;
    if (lane % (kWarp / 2) == 0) {
      Moments<S>& own = all[threadIdx.x / kWarp];
      (lane == 0 ? own.a : own.b) = mine;
    }
    if constexpr (H::kShares) {
      cuda::barrier_sync(1 + threadIdx.y, blockDim.x);
    } else {
      __syncthreads();
    }
    if constexpr (H::kStays) {
      turn_ ^= 1;
    }
    return all;
  }

  Shared& shared_;
  const int first_;
  int turn_ = 0;
};

// The moments of a warp's part of a row, which the warps of a cluster exchange: of one pass, `sum` and `squares` are
// sums over the elements; of two passes, they are the mean of `count` elements and Σ (x − mean)².
template <class S, bool kTwoPasses>
struct WarpMoments {
  static constexpr int kNumbers = kTwoPasses ? 3 : 2;

  S sum;
  S squares;
  S count;  // only of two passes

  __device__ static WarpMoments empty() { return {0, 0, 0}; }

  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, sum);
    f(1, squares);
    if constexpr (kTwoPasses) {
      f(2, count);
    }
  }

  template <class Read>
  __device__ static WarpMoments of_places(int n, const Read& read) {
    WarpMoments all = empty();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 2
    for (int place = lane; place < n; place += kWarp) {
      const WarpMoments warp = read(place);
      all.sum += kTwoPasses ? warp.count * warp.sum : warp.sum;
      kTwoPasses ? all.count += warp.count : all.squares += warp.squares;
    }
    all.sum = sum_lanes<kWarp>(all.sum);
    if constexpr (kTwoPasses) {  // Chan's formula
      all.sum *= reciprocal(sum_lanes<kWarp>(all.count));
#pragma unroll 2
      for (int place = lane; place < n; place += kWarp) {
        const WarpMoments warp = read(place);
        const S difference = warp.sum - all.sum;
        all.squares += fma(warp.count * difference, difference, warp.squares);
      }
    }
    all.squares = sum_lanes<kWarp>(all.squares);
    return all;
  }
};

// The same for the warps of a cluster.
template <class H>
class TeamMeeting<H, Team::cluster> {
  using S = typename H::S;
  using Part = WarpMoments<S, H::N::kCentered && !kOnePass<typename H::T, H::V>>;
  using Exchange = held::Exchange<Part, Team::cluster, H::kStays ? 2 : 1>;

 public:
  using Shared = typename Exchange::Shared;

  __device__ TeamMeeting(Shared& shared, const NormForwardPlan& p) : exchange_(shared, p.blocks) {}

  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, const Place<H>& place) {
    const S sums = sum_pair(mine.a, mine.b);
    const Part row = exchange_.joined_warps(
        {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2), S(0)}, place.rank);
    return {row.sum, row.squares};
  }

  __device__ Moments<S> combine(const Moments<S>& mine, const Place<H>& place, S in_row) {
    const S count = static_cast<S>(__reduce_add_sync(kAllLanes, place.elements()));
    const Moments<S> warp = combine_warp<H>(mine, place);
    const Part row = exchange_.joined_warps({warp.a, warp.b, count}, place.rank);
    return {row.sum, row.squares};
  }

 private:
  Exchange exchange_;
};

}  // namespace mica::kernels::norm_cuda
