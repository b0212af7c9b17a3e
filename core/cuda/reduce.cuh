#pragma once

// Reductions over the lanes of a warp, in a fixed order. Every lane gets the same bits; cub::WarpReduce gives the
// result to lane 0 only.

namespace mica::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffff;

/// Combines the values of kLanes neighboring lanes by f. All of them get the result.
template <int kLanes, class S, class F>
__device__ S reduce_lanes(S value, const F& f) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = f(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

/// The sum over kLanes neighboring lanes. All of them get it.
template <int kLanes, class S>
__device__ S sum_lanes(S value) {
  return reduce_lanes<kLanes>(value, [](S a, S b) { return a + b; });
}

}  // namespace mica::cuda
