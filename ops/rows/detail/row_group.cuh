#pragma once

// How the threads that share a row combine what each of them has computed from its part:
//
//     lanes ──shuffles──▶ warps ──shared memory, or that of all blocks of the cluster──▶ the same bits in all threads

#include <cstdint>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/ops/rows/detail/row_plan.h>

namespace mica::kernels::rows {

using cuda::kAllLanes;
using cuda::kWarp;

/// Returns the sum of a over kLanes lanes in the lower half of these lanes, and that of b in the upper half.
template <int kLanes, class S>
__device__ S sum_pair_of_lanes(S a, S b) {
  const bool upper = threadIdx.x % kLanes >= kLanes / 2;
  const S mine = (upper ? b : a) + __shfl_xor_sync(kAllLanes, upper ? a : b, kLanes / 2);
  return cuda::sum_lanes<kLanes / 2>(mine);
}

/// One or more sums over a row. This is an example of a Value, which RowGroup reduces. A Value has
///     Number, kNumbers             // of what it consists: floats or doubles
///     for_numbers(f)               // calls f(k, number) for each of them
///     empty()                      // the neutral element
///     join(other)                  // adds the result of another part of the row
///     over_lanes<kLanes>()         // combines those of neighboring lanes, with the same bits in each lane
///     over_parts(n, read)          // optional: combines read(0) to read(n − 1), which is faster than join()
template <class S, int kSums>
struct RowSums {
  using Number = S;
  static constexpr int kNumbers = kSums;

  S at[kSums];

  __device__ RowSums empty() const { return {}; }
  template <class F>
  __device__ void for_numbers(const F& f) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      f(k, at[k]);
    }
  }
  __device__ void join(const RowSums& other) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      at[k] += other.at[k];
    }
  }
  template <int kLanes>
  __device__ RowSums over_lanes() const {
    RowSums all;
    if constexpr (kSums == 2 && kLanes >= 4) {
      const S sum = sum_pair_of_lanes<kLanes>(at[0], at[1]);
      all.at[0] = __shfl_sync(kAllLanes, sum, 0, kLanes);
      all.at[1] = __shfl_sync(kAllLanes, sum, kLanes / 2, kLanes);
    } else {
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        all.at[k] = cuda::sum_lanes<kLanes>(at[k]);
      }
    }
    return all;
  }
};

/// Reduces a Value over the threads that share a row. A block may have several such groups (kSeveral): threadIdx.y is
/// the number of a thread's group, and threadIdx.x its index in the group. The buffers are used in turn, so that two
/// are enough for one barrier per row.
///
/// In a cluster, each warp sends its result into the shared memory of every block, where an mbarrier counts the
/// arriving bytes. A cluster barrier would also wait for the blocks' writes to global memory.
///
/// Instead of all_reduce(), a cluster may call send() for the next row and then receive() for this one, with four
/// buffers: a warp that sends row r + 4 has received row r + 2, which all warps sent after they had received row r.
template <class Value, Group kGroup, int kLanes = kWarp, bool kSeveral = false, int kBuffers = kSeveral ? 2 : 1>
class RowGroup {
  using Number = typename Value::Number;
  static constexpr int kNumbers = Value::kNumbers;
  static constexpr bool kCluster = kGroup == Group::cluster;
  static constexpr bool kWarps = kCluster || kGroup == Group::block;
  static constexpr int kMostWarps = kCluster ? kMostCluster * kMostGroupThreads / kWarp : kWarps ? kWarp : 1;

 public:
  struct Exchange {
    Number numbers[kBuffers][kNumbers][kMostWarps];
    std::uint64_t arrived[kCluster ? kBuffers : 1];
  };

  /// @param blocks  the number of blocks that share a row.
  /// Construct it before loads from global memory are issued, since in a cluster the constructor waits for them.
  __device__ explicit RowGroup(Exchange& exchange, int blocks = 1)
      : exchange_(exchange), blocks_(kCluster ? blocks : 1) {
    if constexpr (kCluster) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int buffer = 0; buffer < kBuffers; ++buffer) {
          cuda::init_barrier(&exchange_.arrived[buffer], 1);
          expect(buffer);
        }
        cuda::publish_barriers();
      }
      __syncwarp();
      cuda::arrive_in_cluster();
    }
  }

  /// The block's rank among those that share a row.
  __device__ static int rank() { return kCluster ? cuda::cluster_rank() : 0; }

  /// The group's result from those of its threads, with the same bits in all of them.
  __device__ Value all_reduce(const Value& mine) { return reduce_warps(mine.template over_lanes<kLanes>()); }

  /// The same, from results that are already combined over the lanes of a warp that share the row.
  __device__ Value reduce_warps(const Value& warp) {
    if constexpr (!kWarps) {
      return warp;
    } else {
      send(warp);
      return receive(warp);
    }
  }

  /// Gives a warp's result to the other warps.
  __device__ void send(Value warp) {
    static_assert(kWarps);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int number = static_cast<int>(threadIdx.x) / kWarp;
    const int buffer = sent_ % kBuffers;
    if constexpr (kCluster) {
      if (sent_ == 0) {
        cuda::wait_for_cluster();  // until all blocks have initialized their barriers
      }
      const int index = rank() * warps() + number;
      if (lane < blocks_) {
        warp.for_numbers([&](int k, Number& value) {
          cuda::send(&exchange_.numbers[buffer][k][index], lane, value, &exchange_.arrived[buffer]);
        });
      }
    } else if (lane == 0) {
      warp.for_numbers([&](int k, Number& value) { exchange_.numbers[buffer][k][first() + number] = value; });
    }
    ++sent_;
  }

  /// Waits for the results of all warps and combines them. `warp` is what this warp has sent.
  __device__ Value receive(const Value& warp) {
    static_assert(kWarps);
    const int buffer = received_ % kBuffers;
    if constexpr (kCluster) {
      cuda::wait(&exchange_.arrived[buffer], received_ / kBuffers % 2);
      if (kBuffers > 1 && threadIdx.x == 0) {
        expect(buffer);  // for the next use of this buffer
      }
    } else if constexpr (kSeveral) {
      cuda::barrier_sync(1 + threadIdx.y, blockDim.x);
    } else {
      __syncthreads();
    }
    ++received_;
    const auto read = [&](int index) {
      Value other = warp.empty();
      other.for_numbers([&](int k, Number& value) { value = exchange_.numbers[buffer][k][first() + index]; });
      return other;
    };
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if constexpr (!kCluster) {  // up to 16 warps, or 32 of a single group
      const Value other = lane < warps() ? read(lane) : warp.empty();
      return other.template over_lanes<kWarp>();
    } else if constexpr (requires { Value::over_parts(1, read); }) {
      return Value::over_parts(blocks_ * warps(), read);
    } else {
      Value all = warp.empty();
#pragma unroll 2
      for (int index = lane; index < blocks_ * warps(); index += kWarp) {
        all.join(read(index));
      }
      return all.template over_lanes<kWarp>();
    }
  }

 private:
  __device__ static int warps() { return static_cast<int>(blockDim.x) / kWarp; }  // of the block, that share a row
  __device__ static int first() { return kSeveral && !kCluster ? static_cast<int>(threadIdx.y) * warps() : 0; }

  __device__ void expect(int buffer) {
    cuda::arrive_expecting(&exchange_.arrived[buffer], blocks_ * warps() * kNumbers * static_cast<int>(sizeof(Number)));
  }

  Exchange& exchange_;
  int blocks_;
  unsigned sent_ = 0;      // rows for which this warp has sent its result
  unsigned received_ = 0;  // rows whose results it has received
};

}  // namespace mica::kernels::rows
