#pragma once

// Streamed rows: how the threads that share a row add up its two sums.

#include <cstdint>

#include <mica/ops/norm/detail/norm_backward_stream_shape_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// Sums a and b over kLanes lanes. Returns the sum of a in the lower half of these lanes, that of b in the upper half.
template <int kLanes>
__device__ float sum_pair_of_lanes(float a, float b) {
  const bool upper = threadIdx.x % kLanes >= kLanes / 2;
  const float mine = (upper ? b : a) + __shfl_xor_sync(kAllLanes, upper ? a : b, kLanes / 2);
  return sum_lanes<kLanes / 2>(mine);
}

/// Adds up two numbers per warp of a team through shared memory. Each member of the team leaves its two numbers, and
/// all members read those of all others. Members are the warps of a block or, in a cluster, its up to 16 blocks, each
/// of which first adds up its warps' numbers. Leaving does not wait, except that in a cluster, one warp of each block
/// waits for the block's other warps. A warp may be a row ahead of others.
///
/// Wherever a warp has two numbers, the first is in its lower 16 lanes, the second in the upper ones.
template <Team kTeam>
class Meeting {
 public:
  __device__ Meeting(const StreamPlan& p, int rank, unsigned char* memory)
      : blocks_(p.cluster),
        warps_(p.warps()),
        rank_(rank),
        barriers_(reinterpret_cast<std::uint64_t*>(memory) + threadIdx.y * (kLevels * kMeetings)),
        numbers_(reinterpret_cast<float*>(memory + p.meeting_begin()) +
                 threadIdx.y * (kMeetings * 2 * (warps_ + (kTeam == Team::cluster ? blocks_ : 0)))) {
    if (kTeam != Team::warp && threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kLevels * kMeetings; ++i) {
        cuda::init_barrier(barriers_ + i, i < kMeetings ? 2 * warps_ : 1);
      }
      if (kTeam == Team::cluster) {
        cuda::publish_barriers();
      }
    }
    __syncthreads();  // race checkers want barriers to be initialized before copies begin
  }

  /// Call it after the constructor. Waits for the barriers of all blocks of the team, and for what this block's threads
  /// have written to shared memory.
  __device__ void open() const {
    __syncthreads();
    if (kTeam == Team::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

  /// Leaves a warp's two numbers.
  __device__ void leave(float mine) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int slot = left_ % kMeetings;
    float* const in_block = numbers_ + slot * 2 * warps_;
    __syncwarp();  // all lanes have read the numbers of earlier rows
    if (lane % (kWarp / 2) == 0) {
      in_block[lane / (kWarp / 2) * warps_ + warp] = mine;
      cuda::arrive(barriers_ + slot);
    }
    if constexpr (kTeam == Team::cluster) {
      if (left_ % warps_ == warp) {  // the warps take turns
        cuda::wait(barriers_ + slot, left_ / kMeetings % 2);
        const float block = add_up(in_block, warps_);
        std::uint64_t* const barrier = barriers_ + kMeetings + slot;
        if (lane == 0) {
          cuda::arrive_expecting(barrier, 2 * blocks_ * static_cast<int>(sizeof(float)));
        }
        float* const place = numbers_ + kMeetings * 2 * warps_ + (slot * 2 + lane / (kWarp / 2)) * blocks_ + rank_;
        if (lane % (kWarp / 2) < blocks_) {
          cuda::send(place, lane % (kWarp / 2), block, barrier);
        }
      }
    }
    ++left_;
  }

  /// Waits until all members have left their numbers for the next row that was not taken yet. Returns the two sums.
  __device__ float take() {
    const int slot = taken_ % kMeetings;
    constexpr int kLast = kLevels - 1;
    cuda::wait(barriers_ + kLast * kMeetings + slot, taken_ / kMeetings % 2);
    if (kTeam == Team::cluster) {
      // This phase was completed earlier. Waiting for it nevertheless orders this warp after the reads of the other
      // warps, which race checkers recognize, too.
      cuda::wait(barriers_ + slot, taken_ / kMeetings % 2);
    }
    ++taken_;
    const int members = kTeam == Team::cluster ? blocks_ : warps_;
    return add_up(numbers_ + kLast * (kMeetings * 2 * warps_) + slot * 2 * members, members);
  }

  /// Call it before the kernel ends: blocks must not send numbers to a block that has exited.
  __device__ void close() const {
    if (kTeam == Team::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

 private:
  static constexpr int kLevels = kTeam == Team::cluster ? 2 : 1;

  // The two sums of the first numbers of all members, followed by their second numbers.
  __device__ static float add_up(const float* numbers, int members) {
    const int lane = threadIdx.x % kWarp;
    const int member = lane % (kWarp / 2);
    const float number = numbers[lane / (kWarp / 2) * members + min(member, members - 1)];  // avoids a branch
    return sum_lanes<kWarp / 2>(member < members ? number : 0.0f);
  }

  int blocks_;
  int warps_;
  int rank_;
  unsigned left_ = 0;
  unsigned taken_ = 0;
  std::uint64_t* barriers_;
  float* numbers_;
};

}  // namespace mica::kernels::norm_cuda
