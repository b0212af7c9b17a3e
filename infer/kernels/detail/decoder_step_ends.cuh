#pragma once

// The decoder step's beginning and end: the new position's embedding, and the token of the largest logit. See
// decoder_step_sm90.cu.

#include <cmath>
#include <cstdint>

#include <mica/infer/kernels/detail/decoder_step.cuh>
#include <mica/infer/kernels/detail/score_key.cuh>

namespace mica::kernels::decoder {

/// The step's x. This object is in shared memory; x itself is in global memory.
template <class T>
struct StepInput {
  const T* row;  // null: all elements are NaN

  /// Called by one thread.
  __device__ void find(const Arguments<T>& a) {
    row = a.x;
    if (a.x == nullptr) {
      const std::int64_t token = *a.token;
      row = token >= 0 && token < a.vocab ? a.embedding + token * a.width : nullptr;
    }
  }

  /// Four elements from term `at` on.
  __device__ uint2 read(int at) const {
    constexpr std::uint32_t kNaNs = 0x7fff7fff;  // of float16 and of bfloat16
    return row != nullptr ? *reinterpret_cast<const uint2*>(row + at) : uint2{kNaNs, kNaNs};
  }
  __device__ float at(int term) const { return row != nullptr ? static_cast<float>(row[term]) : NAN; }
};

/// The largest of some scores and its token (of equal scores, the smallest token), as one integer. The integer for
/// several parts is the maximum of theirs, in any order. It is 0 if there are no scores, and larger than all others if
/// a score is NaN or +inf.
struct Candidate {
  static constexpr unsigned long long kInvalid = ~0ull;
  static constexpr std::uint32_t kMinusInfinity = ~0xff800000u;  // the key of -inf

  unsigned long long bits = 0;

  __device__ void add(float score, int token) {
    const unsigned long long both =
        static_cast<unsigned long long>(score_key(score)) << 32 | ~static_cast<std::uint32_t>(token);
    bits = max(bits, score < INFINITY ? both : kInvalid);
  }

  /// -1 if a score is NaN or +inf, or all are -inf.
  __device__ std::int64_t token() const {
    const bool is_valid = bits != kInvalid && bits >> 32 > kMinusInfinity;
    return is_valid ? static_cast<std::int64_t>(~static_cast<std::uint32_t>(bits)) : -1;
  }
};

/// Called by the two finisher warps of each block. The last warp to arrive ends the step; by then, all blocks have read
/// what it overwrites.
template <class T>
__device__ void end_step(const Arguments<T>& a, Candidate largest) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    largest.bits = max(largest.bits, __shfl_xor_sync(cuda::kAllLanes, largest.bits, step));
  }
  if (threadIdx.x % kWarp != 0) {
    return;
  }
  StepState& state = *a.state;
  if (a.next_token != nullptr) {
    atomicMax(&state.largest, largest.bits);
  }
  const int warps = static_cast<int>(gridDim.x) * (kFinishers / kWarp);
  if (cuda::exchange_add(&state.arrived, 1) != warps - 1) {
    return;
  }
  state.arrived = 0;
  state.ended ^= 1;
  if (a.next_token != nullptr) {
    const std::int64_t token = Candidate{atomicExch(&state.largest, 0)}.token();
    *a.next_token = token;
    if (a.tokens_on_host != nullptr) {
      a.tokens_on_host[*a.length % 2] = token;
    }
  }
  if (a.adds_to_length) {
    *a.length += 1;
  }
}

}  // namespace mica::kernels::decoder
