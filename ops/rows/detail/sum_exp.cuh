#pragma once

// The reductions over a row that softmax and its backward need, computed in parts: SumExp, the largest element and the
// sum of all exp(x − largest), and PlainSum. RowGroup reduces them over the threads of a row.

#include <limits>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/dtype.h>
#include <mica/core/math.h>

namespace mica::kernels {

/// The larger number; if one is NaN, the other.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

/// The largest value, and the sum, over `lanes` neighboring lanes.
template <class S>
__device__ S largest_of_lanes(S value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    value = larger(value, __shfl_xor_sync(cuda::kAllLanes, value, step));
  }
  return value;
}
template <class S>
__device__ S sum_of_lanes(S value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(cuda::kAllLanes, value, step);
  }
  return value;
}

template <class S>
constexpr S kLog2E = S(1.4426950408889634);

/// 2ˣ by the hardware's approximation (ex2.approx), with a relative error of 2⁻²².
struct BinaryPower {
  __device__ float operator()(float x) const { return cuda::approximate_exp2(x); }
};

/// eˣ for elements of T. For 16-bit elements, it is the hardware's approximation of 2^(x · log₂e), which includes the
/// rounding error of that product.
template <class T>
struct NaturalPower {
  __device__ Accumulate<T> operator()(Accumulate<T> x) const {
    if constexpr (sizeof(T) == 2) {
      return BinaryPower{}(x * kLog2E<float>);
    } else {
      return math::exp(x);
    }
  }
};

/// The largest element so far and Σ power(x − largest), which is rescaled when a larger element comes (online softmax:
/// Milakov and Gimelshein, arXiv:1805.02867).
///
/// Before the first element, `largest` is the lowest finite number, so that differences are not NaN: a row of −∞ has
/// the sum 0. A row with ∞ or NaN has the sum NaN.
template <class S, class Power>
struct SumExp {
  using Number = S;
  static constexpr int kNumbers = 2;

  S largest;
  S sum;
  Power power;

  // A function instead of member initializers, since objects in shared memory cannot be initialized.
  __device__ static SumExp nothing(const Power& power = {}) { return {std::numeric_limits<S>::lowest(), S{0}, power}; }
  __device__ SumExp empty() const { return nothing(power); }

  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, largest);
    f(1, sum);
  }

  /// Makes `top`, which is not less than the largest so far, the new `largest`.
  __device__ void raise(S top) {
    sum *= power(largest - top);
    largest = top;
  }
  __device__ void join(const SumExp& other) {
    const S top = larger(largest, other.largest);
    SumExp same = other;
    same.raise(top);
    raise(top);
    sum += same.sum;
  }
  /// Combines the largest elements first, so that each lane computes only one power. At each step of a shuffle, both
  /// lanes add the same two numbers, so that all lanes get the same bits.
  template <int kLanes>
  __device__ SumExp over_lanes() const {
    SumExp all = *this;
    all.raise(largest_of_lanes(largest, kLanes));
    all.sum = sum_of_lanes(all.sum, kLanes);
    return all;
  }
};

template <class S>
struct PlainSum {
  using Number = S;
  static constexpr int kNumbers = 1;

  S sum;

  __device__ static PlainSum nothing() { return {S{0}}; }
  __device__ PlainSum empty() const { return nothing(); }
  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, sum);
  }
  __device__ void join(const PlainSum& other) { sum += other.sum; }
  template <int kLanes>
  __device__ PlainSum over_lanes() const {
    return {sum_of_lanes(sum, kLanes)};
  }
};

}  // namespace mica::kernels
