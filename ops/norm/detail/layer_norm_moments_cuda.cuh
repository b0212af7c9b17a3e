#pragma once

// How threads share a row of layer_norm's forward, and how its moments come from those of its threads.

#include <climits>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/layer_norm_forward_cuda.cuh>

namespace mica::kernels::layer_norm_cuda {

// Who shares a row: a warp or some of its lanes, a block, or several blocks.
enum class Team { warp, block, blocks };

// How the threads share a row: P packs each, `threads` threads in each of `slabs` blocks.
struct ForwardPlan {
  int packs = 0;       // P
  int lanes = 0;       // of a warp that share a row
  int threads = 0;     // of a block that share a row; 0: the row is too long
  int teams = 1;       // of so many threads, in a block
  int slabs = 1;       // blocks that share a row
  int slab = 0;        // columns of a row that a block has
  bool ahead = false;  // a block stays for row after row
};

constexpr int kForwardSlabs = 32;  // blocks that share a row, at most

// Where the warps of a block meet.
template <class S>
class Meeting {
 public:
  __device__ explicit Meeting(Moments<S>* moments) : moments_(moments) {}

  /// Leaves a warp's moments, a in its lower 16 lanes and b in the upper ones, and waits for those of the others.
  __device__ void meet(S mine) const {
    const int lane = threadIdx.x % kWarp;
    if (lane % (kWarp / 2) == 0) {
      Moments<S>& own = moments_[threadIdx.x / kWarp];
      (lane == 0 ? own.a : own.b) = mine;
    }
    __syncthreads();
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
template <int V, int P, int kLanes, Team kTeam>
struct Place {
  int slabs;
  int slab;  // columns
  int rank;  // of the block among those that share the row
  // A block's number is an int.
  std::conditional_t<kTeam == Team::warp, std::int64_t, int> row;
  bool present;
  std::conditional_t<kTeam == Team::blocks, std::int64_t, int> at;  // the thread's first column
  Share<V, P, kLanes> share;

  __device__ Place(const ForwardPlan& p, std::int64_t rows, std::int64_t columns, int lane, int block)
      : slabs(p.slabs),
        slab(p.slab),
        rank(kTeam == Team::blocks ? block % p.slabs : 0),
        row(kTeam == Team::blocks  ? block / p.slabs
            : kTeam == Team::block ? block
                                   : std::int64_t{block} * p.teams + threadIdx.y),
        present(row < rows),
        share(lane, present ? in_slab(columns, rank) : 0) {
    at = share.first;
    if constexpr (kTeam == Team::blocks) {
      at += std::int64_t{rank} * slab;
    }
  }

  /// How many columns of a row block number `rank` has.
  __device__ std::int64_t in_slab(std::int64_t columns, int rank) const {
    if constexpr (kTeam != Team::blocks) {
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
    if constexpr (kTeam == Team::warp) {
      return combine_lanes<kLanes>(mine, count, in_row);
    } else {
      const S warp_count = static_cast<S>(__reduce_add_sync(kAllLanes, share.elements()));
      const Moments<S> warp = combine_lanes<kWarp>(mine, count, reciprocal(warp_count));
      const Meeting<S> meeting(moments);
      const int lane = threadIdx.x % kWarp;
      meeting.meet(lane < kWarp / 2 ? warp.a : warp.b);
      const std::int64_t in_block = in_slab(columns, rank);
      const int left = static_cast<int>(in_block) - lane * (P * kWarp * V);
      const S other_count = static_cast<S>(max(0, min(P * kWarp * V, left)));
      Moments<S> m = meeting.combine(other_count, reciprocal(static_cast<S>(in_block)));
      if constexpr (kTeam == Team::blocks) {
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

  /// The sums of both numbers over the row.
  template <class S>
  __device__ Moments<S> sum(const Moments<S>& mine, Moments<S>* moments, const SlabMeeting<S>& slab_meeting) const {
    if constexpr (kLanes < kWarp) {
      return {sum_lanes<kLanes>(mine.a), sum_lanes<kLanes>(mine.b)};
    } else {
      const S sums = sum_pair(mine.a, mine.b);
      if constexpr (kTeam == Team::warp) {
        return {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2)};
      } else {
        const Meeting<S> meeting(moments);
        meeting.meet(sums);
        Moments<S> m = meeting.sum();
        if constexpr (kTeam == Team::blocks) {
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

}  // namespace mica::kernels::layer_norm_cuda
