#pragma once

// How the threads that hold a row share it, and how its moments come from those of its threads.

#include <climits>
#include <cstdint>
#include <type_traits>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/stream.h>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

namespace mica::kernels::norm_cuda {

// Where the warps of a team meet: all of a block's or, if kSeveral, those that have one of its rows.
template <class S, bool kSeveral>
class TeamMeeting {
 public:
  __device__ explicit TeamMeeting(Moments<S>* moments) : moments_(moments + (kSeveral ? threadIdx.y * warps() : 0)) {}

  /// Leaves a warp's moments, a in its lower 16 lanes and b in the upper ones, and waits for those of the others.
  __device__ void meet(S mine) const {
    const int lane = threadIdx.x % kWarp;
    if (lane % (kWarp / 2) == 0) {
      Moments<S>& own = moments_[threadIdx.x / kWarp];
      (lane == 0 ? own.a : own.b) = mine;
    }
    if constexpr (kSeveral) {
      cuda::barrier_sync(1 + threadIdx.y, blockDim.x);
    } else {
      __syncthreads();
    }
  }

  /// The sums of both numbers.
  __device__ Moments<S> sum() const {
    const int lane = threadIdx.x % kWarp;
    S sum = 0;
    if (lane % (kWarp / 2) < warps()) {
      const Moments<S>& other = moments_[lane % (kWarp / 2)];
      sum = lane < kWarp / 2 ? other.a : other.b;
    }
    sum = sum_lanes<kWarp / 2>(sum);
    return {__shfl_sync(kAllLanes, sum, 0), __shfl_sync(kAllLanes, sum, kWarp / 2)};
  }

  /// The moments of all elements; `count` of them are those of warp number `lane`.
  __device__ Moments<S> combine(S count, S reciprocal_n) const {
    const int lane = threadIdx.x % kWarp;
    const Moments<S> mine = lane < warps() ? moments_[lane] : Moments<S>{0, 0};
    return combine_lanes<kWarp>(mine, lane < warps() ? count : S(0), reciprocal_n);
  }

 private:
  __device__ static int warps() { return blockDim.x / kWarp; }

  Moments<S>* moments_;
};

// Where the blocks that share a row meet, in global memory. A block waits only for blocks with lower numbers and for
// those that share its row. Numbers are given out in the order in which blocks begin; so the lowest row that is not
// done has all of its blocks at work, or there is room for them, and nobody waits in vain.
template <class S>
struct SlabMeeting {
  int* begun;           // how many blocks have
  int* arrivals;        // (M), zeros at first
  Moments<S>* moments;  // (M, slabs)

  /// The calling block's number.
  __device__ int number() const {
    __shared__ int number;
    if (threadIdx.x == 0) {
      number = atomicAdd(begun, 1);
    }
    __syncthreads();
    return number;
  }

  /// Leaves the block's moments and waits for the others'. Returns those of all, each slab's at its place.
  __device__ const Moments<S>* meet(std::int64_t row, int rank, int slabs, const Moments<S>& mine) const {
    Moments<S>* const all = moments + row * slabs;
    if (threadIdx.x == 0) {
      all[rank] = mine;
      cuda::release_add(arrivals + row, 1);
      while (cuda::load_acquire(arrivals + row) < slabs) {
      }
    }
    __syncthreads();
    return all;
  }
};

// Their memory; none if there are no rows.
template <class S>
class SlabMeetingMemory {
 public:
  SlabMeetingMemory(std::int64_t rows, int slabs) {
    if (rows > 0) {
      int index = 0;
      cuda::check(cudaGetDevice(&index), "cudaGetDevice");
      const Device device = Device::cuda(index);
      counts_ = empty({rows + 1}, int32, device);
      moments_ = empty({rows, slabs, 2}, dtype_of<S>, device);
      cuda::check(cudaMemsetAsync(counts_.data<std::int32_t>(), 0, counts_.bytes(), cuda::current_stream()),
                  "cudaMemsetAsync");
    }
  }

  SlabMeeting<S> on_device() const {
    if (!counts_.defined()) {
      return {};
    }
    std::int32_t* const counts = counts_.data<std::int32_t>();
    return {.begun = counts, .arrivals = counts + 1, .moments = reinterpret_cast<Moments<S>*>(moments_.data<S>())};
  }

 private:
  Tensor counts_;
  Tensor moments_;
};

// A thread's packs of a row, or of a slab of one: kLanes lanes have P · kLanes of them, one after another.
template <int V, int P, int kLanes>
struct Share {
  int first;  // column
  int columns;

  __device__ Share(int lane, std::int64_t columns)
      : first((lane / kLanes * (P * kLanes) + lane % kLanes) * V), columns(static_cast<int>(columns)) {}
  __device__ bool has(int i) const { return first + i * (kLanes * V) < columns; }
  __device__ int elements() const {
    const int packs = (columns - first + kLanes * V - 1) / (kLanes * V);
    return V * max(0, min(P, packs));
  }
};

// A team's row, and the thread's place in it.
// kSeveral: a block has several rows, also where more than a warp shares one.
template <int V, int P, int kLanes, RowTeam kTeam, bool kSeveral>
struct Place {
  int slabs;
  int slab;  // columns
  int rank;  // of the block among those that share the row
  // A block's number is an int.
  std::conditional_t<kTeam <= RowTeam::warp, std::int64_t, int> row;
  bool present;
  std::conditional_t<kTeam == RowTeam::blocks, std::int64_t, int> at;  // the thread's first column
  Share<V, P, kLanes> share;

  __device__ Place(const NormForwardPlan& p, std::int64_t rows, std::int64_t columns, int lane, int block)
      : slabs(p.blocks),
        slab(p.slab),
        rank(kTeam == RowTeam::blocks ? block % p.blocks : 0),
        row(kTeam == RowTeam::blocks  ? block / p.blocks
            : kTeam == RowTeam::block ? (kSeveral ? block * p.teams + static_cast<int>(threadIdx.y) : block)
                                      : std::int64_t{block} * p.teams + threadIdx.y),
        present(row < rows),
        share(lane, present ? in_slab(columns, rank) : 0) {
    at = share.first;
    if constexpr (kTeam == RowTeam::blocks) {
      at += std::int64_t{rank} * slab;
    }
  }

  /// How many columns of a row block number `rank` has.
  __device__ std::int64_t in_slab(std::int64_t columns, int rank) const {
    if constexpr (kTeam != RowTeam::blocks) {
      return columns;
    }
    const std::int64_t left = columns - std::int64_t{rank} * slab;
    return left < 0 ? 0 : left < slab ? left : slab;
  }

  /// The moments of the row from those of the thread's elements: the same bits in each thread.
  template <class S>
  __device__ Moments<S> combine(std::int64_t columns, const Moments<S>& mine, Moments<S>* moments,
                                const SlabMeeting<S>& slab_meeting) const {
    const S in_row = S(1) / static_cast<S>(columns);
    const S count = static_cast<S>(share.elements());
    if constexpr (kTeam <= RowTeam::warp) {
      return combine_lanes<kLanes>(mine, count, in_row);
    } else {
      const S warp_count = static_cast<S>(__reduce_add_sync(kAllLanes, share.elements()));
      const Moments<S> warp = combine_lanes<kWarp>(mine, count, reciprocal(warp_count));
      const TeamMeeting<S, kSeveral> meeting(moments);
      const int lane = threadIdx.x % kWarp;
      meeting.meet(lane < kWarp / 2 ? warp.a : warp.b);
      const std::int64_t in_block = in_slab(columns, rank);
      const int left = static_cast<int>(in_block) - lane * (P * kWarp * V);
      const S other_count = static_cast<S>(max(0, min(P * kWarp * V, left)));
      Moments<S> m = meeting.combine(other_count, reciprocal(static_cast<S>(in_block)));
      if constexpr (kTeam == RowTeam::blocks) {
        const Moments<S>* const all = slab_meeting.meet(row, rank, slabs, m);
        const auto sum_over = [&](auto term) {
          S sum = 0;
#pragma unroll 1
          for (int i = lane; i < slabs; i += kWarp) {
            sum += term(static_cast<S>(in_slab(columns, i)), __ldcg(&all[i].a), __ldcg(&all[i].b));
          }
          return sum_lanes<kWarp>(sum);
        };
        const S mean = sum_over([](S n, S a, S) { return n * a; }) * in_row;
        m = {mean, sum_over([&](S n, S a, S b) { return b + n * (a - mean) * (a - mean); })};
      }
      return m;
    }
  }

  /// The sums of both numbers over the row; not kBoth: the first one need not be.
  template <bool kBoth, class S>
  __device__ Moments<S> sum(const Moments<S>& mine, Moments<S>* moments, const SlabMeeting<S>& slab_meeting) const {
    if constexpr (kLanes < kWarp) {
      return {kBoth ? sum_lanes<kLanes>(mine.a) : mine.a, sum_lanes<kLanes>(mine.b)};
    } else {
      const S sums = sum_pair(mine.a, mine.b);
      if constexpr (kTeam == RowTeam::warp) {
        return {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2)};
      } else {
        const TeamMeeting<S, kSeveral> meeting(moments);
        meeting.meet(sums);
        Moments<S> m = meeting.sum();
        if constexpr (kTeam == RowTeam::blocks) {
          const Moments<S>* const all = slab_meeting.meet(row, rank, slabs, m);
          m = {0, 0};
#pragma unroll 1
          for (int i = threadIdx.x % kWarp; i < slabs; i += kWarp) {
            m.a += __ldcg(&all[i].a);
            m.b += __ldcg(&all[i].b);
          }
          m = {sum_lanes<kWarp>(m.a), sum_lanes<kWarp>(m.b)};
        }
        return m;
      }
    }
  }
};

}  // namespace mica::kernels::norm_cuda
