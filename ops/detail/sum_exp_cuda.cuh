#pragma once

// What a softmax needs to know of a row, found in parts: the largest element and the sum of all powers relative to it;
// for its gradient, a sum. See row_team_cuda.cuh for how the parts of threads are joined.

#include <limits>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/dtype.h>
#include <mica/core/math.h>

namespace mica::kernels {

/// If one is NaN, the other.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

/// The largest of neighboring lanes' values.
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

/// 2ˣ by the chip's approximation, with a relative error of 2⁻²².
struct BinaryPower {
  __device__ float operator()(float x) const { return cuda::approximate_exp2(x); }
};

/// eˣ of elements of T: of 16 bits by the chip's approximation of 2ˣ, with what x · log₂e has lost.
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

/// The largest of what was added so far, and Σ power(x − largest), kept true as the largest grows (Milakov and
/// Gimelshein, arXiv:1805.02867).
///
/// `largest` is finite where there is nothing, so that no difference is NaN: a row of −∞ has the sum 0. A row with ∞ or
/// NaN has the sum NaN.
template <class S, class Power>
struct SumExp {
  static constexpr int kNumbers = 2;

  S largest;
  S sum;
  Power power;

  // Not member initializers: these also stand in shared memory, which cannot be initialized.
  __device__ static SumExp nothing(const Power& power = {}) { return {std::numeric_limits<S>::lowest(), S{0}, power}; }
  __device__ SumExp empty() const { return nothing(power); }

  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, largest);
    f(1, sum);
  }

  /// To a value that is not less than the largest so far.
  __device__ void raise(S top) {
    sum *= power(largest - top);
    largest = top;
  }
  /// Adds an element that may be larger.
  __device__ void add(S x) {
    if (x > largest) {
      raise(x);
    }
    sum += power(x - largest);
  }
  __device__ void join(const SumExp& other) {
    const S top = larger(largest, other.largest);
    SumExp same = other;
    same.raise(top);
    raise(top);
    sum += same.sum;
  }
  /// The largest comes first, so that each lane needs one power. Partners add the same two numbers.
  __device__ SumExp over_lanes(int lanes) const {
    SumExp all = *this;
    all.raise(largest_of_lanes(largest, lanes));
    all.sum = sum_of_lanes(all.sum, lanes);
    return all;
  }
};

template <class S>
struct PlainSum {
  static constexpr int kNumbers = 1;

  S sum;

  __device__ static PlainSum nothing() { return {S{0}}; }
  __device__ PlainSum empty() const { return nothing(); }
  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, sum);
  }
  __device__ void join(const PlainSum& other) { sum += other.sum; }
  __device__ PlainSum over_lanes(int lanes) const { return {sum_of_lanes(sum, lanes)}; }
};

}  // namespace mica::kernels
