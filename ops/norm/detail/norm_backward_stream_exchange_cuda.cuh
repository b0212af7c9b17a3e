#pragma once

// Streamed rows: how the threads that share a row add up its two sums.

#include <cstdint>

#include <mica/ops/norm/detail/norm_backward_stream_shape_cuda.cuh>
#include <mica/ops/rows/detail/row_group.cuh>

namespace mica::kernels::norm_cuda {

/// Adds up two numbers per warp of a row group. Its warps write them to shared memory, and read those of all others; in
/// a cluster, each block first adds up the numbers of its warps, and then the blocks exchange the results. Writing does
/// not wait, except for one warp per block of a cluster, so a warp may be a row ahead of others.
///
/// The first number of a warp is in its lower 16 lanes, the second in the upper ones. The four lanes of each half that
/// read numbers also arrive at the barriers, so that race checkers see that reads precede arrivals.
template <Group kGroup>
class SumExchange {
 public:
  __device__ SumExchange(const StreamPlan& p, int rank, unsigned char* memory)
      : blocks_(p.cluster),
        warps_(p.warps()),
        rank_(rank),
        numbers_(reinterpret_cast<ExchangeNumbers*>(memory) + threadIdx.y * kLevels) {
    if (kGroup != Group::warp && threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kExchanges; ++i) {
        cuda::init_barrier(numbers_[0].barriers + i, 2 * kReaders * warps_);
        if (kGroup == Group::cluster) {
          cuda::init_barrier(numbers_[1].barriers + i, 1);
        }
      }
      if (kGroup == Group::cluster) {
        cuda::publish_barriers();
      }
    }
    __syncthreads();  // race checkers want barriers to be initialized before copies begin
  }

  /// Call it after copies have begun. Waits for the barriers of all blocks of the row group, and for what this block's
  /// threads have written to shared memory.
  __device__ void open() {
    if (kGroup != Group::warp && threadIdx.x < kWarp) {
      // Absent members then add 0.
      static_assert(sizeof(ExchangeNumbers::numbers) == kWarp * sizeof(float4));
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {
        reinterpret_cast<float4*>(numbers_[level].numbers)[threadIdx.x] = float4{};
      }
    }
    __syncthreads();
    if (kGroup == Group::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

  /// Gives a warp's two numbers to the others.
  __device__ void leave(float mine) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int index = left_ % kExchanges;
    const int half = lane / (kWarp / 2);
    if (lane % (kWarp / 2) == 0) {
      numbers_[0].numbers[index][half][index_of_member(warp)] = mine;
    }
    if (lane % (kWarp / 2) < kReaders) {
      cuda::arrive(numbers_[0].barriers + index);
    }
    if constexpr (kGroup == Group::cluster) {
      if (left_ % warps_ == warp) {  // the warps take turns
        cuda::wait(numbers_[0].barriers + index, left_ / kExchanges % 2);
        const float block = __shfl_sync(kAllLanes, add_up(numbers_[0], index), 0, kWarp / 2);
        ExchangeNumbers& in_cluster = numbers_[1];
        std::uint64_t* const barrier = in_cluster.barriers + index;
        if (lane == 0) {
          cuda::arrive_expecting(barrier, 2 * blocks_ * static_cast<int>(sizeof(float)));
        }
        if (lane % (kWarp / 2) < blocks_) {
          cuda::send(&in_cluster.numbers[index][half][index_of_member(rank_)], lane % (kWarp / 2), block, barrier);
        }
      }
    }
    ++left_;
  }

  /// Waits for the numbers of all members for the next row. Returns the first sum in lane 0 and the second one in lane
  /// 16; the results of other lanes are undefined.
  __device__ float take() {
    const int index = taken_ % kExchanges;
    const int parity = taken_ / kExchanges % 2;
    ExchangeNumbers& last = numbers_[kLevels - 1];
    cuda::wait(last.barriers + index, parity);
    if (kGroup == Group::cluster) {
      // This phase is already complete. Waiting for it orders this warp after the reads of the others, also for race
      // checkers.
      cuda::wait(numbers_[0].barriers + index, parity);
    }
    ++taken_;
    return add_up(last, index);
  }

  /// Call it before the kernel ends: blocks must not send numbers to a block that has exited.
  __device__ void close() const {
    if (kGroup == Group::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

 private:
  static constexpr int kLevels = kGroup == Group::cluster ? 2 : 1;
  static constexpr int kReaders = 4;  // lanes that read the first numbers, and as many that read the second ones

  // The index of a member's number, such that each reader gets four of them by one load.
  __device__ static int index_of_member(int member) { return member % kReaders * 4 + member / kReaders; }

  // Adds up the first numbers of all members in the first readers, and their second numbers in the other ones.
  __device__ static float add_up(const ExchangeNumbers& all, int index) {
    const int lane = threadIdx.x % kWarp;
    float4 own = {};
    if (lane % (kWarp / 2) < kReaders) {
      own = reinterpret_cast<const float4*>(all.numbers[index][lane / (kWarp / 2)])[lane % kReaders];
    }
    return sum_lanes<kReaders>((own.x + own.z) + (own.y + own.w));  // in the order of sum_lanes<16>()
  }

  int blocks_;
  int warps_;
  int rank_;
  unsigned left_ = 0;
  unsigned taken_ = 0;
  ExchangeNumbers* numbers_;  // of the block's warps, followed by those of the cluster's blocks
};

}  // namespace mica::kernels::norm_cuda
