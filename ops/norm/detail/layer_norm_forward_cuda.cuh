#pragma once

// What the CUDA kernels of layer_norm's forward share. T is the type of x and y, W that of weight and bias, S that of
// sums: float, or double for double.

#include <cstdint>

#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/norm/detail/layer_norm_kernels.h>

namespace mica::kernels::layer_norm_cuda {

using namespace rows;

template <class T, class W>
struct Forward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* x;
  const W* weight;
  const W* bias;
  S eps;
  S in_row;  // 1 / columns
  T* y;
  S* mean;  // null, with those that follow: not wanted
  S* mean_rest;
  S* rstd;
  bool x_last_in_l2;  // of what is in the L2 cache, others than x are to go first
};

constexpr int kForwardBlock = 512;  // threads, at most

// Packs of a row that a thread holds in registers, at most.
template <int V>
constexpr int kMostPacks = V == 1   ? 16
                           : V == 8 ? 4
                                    : 8;

// Moments of some elements relative to a shift that is near them. There are two ways to them:
//
// In one pass, for 16-bit elements: a = Σ (x − shift), b = Σ (x − shift)². With the mean of the row's first pack as the
// shift, b is at most 1 + N / V times what is left of it in the variance, so that float32 keeps far more than 16 bits
// of it. In two passes, for others: a = the mean and b = Σ (x − mean)², combined by Chan's formula. A warp of a row
// that streams takes the former to the latter.
template <class S>
struct Moments {
  S a;
  S b;
};

// Whether moments are taken in one pass.
template <class T, int V>
constexpr bool kOnePass = sizeof(T) == 2 && V > 1;

// Elements at the beginning of a row that its shift comes from.
template <class T, int V>
constexpr int kFirst = kOnePass<T, V> ? V : 1;

// The shift of a row that begins with `first`: their mean.
template <class T, int V>
__device__ Accumulate<T> shift_of(const Pack<T, V>& first) {
  using S = Accumulate<T>;
  S values[V];
  unpack(first, values);
  S shift = 0;
#pragma unroll
  for (const S value : values) {
    shift = fma(value, S(1.0 / V), shift);
  }
  return shift;
}

template <class S>
__device__ S reciprocal(S n) {
  return n > 0 ? S(1) / n : S(0);
}

// The moments of `count` elements in each of kLanes lanes together; all of them get them.
template <int kLanes, class S>
__device__ Moments<S> combine_lanes(const Moments<S>& mine, S count, S reciprocal_n) {
  const S mean = sum_lanes<kLanes>(count * mine.a) * reciprocal_n;
  const S difference = mine.a - mean;
  return {mean, sum_lanes<kLanes>(mine.b + count * difference * difference)};
}

/// Of a row that was scaled before; `mean`, and `rounding`, what its rounding added to it, still are.
template <class T, class W, class S>
__device__ void write_statistics(const Forward<T, W>& a, std::int64_t row, S mean, S rounding, S rstd, S scale) {
  if (a.mean != nullptr) {
    a.mean[row] = mean * (scale == 1 ? S(1) : S(1) / kShrink<S>);
    a.rstd[row] = rstd * scale;
    if constexpr (has_mean_rest(sizeof(T))) {
      a.mean_rest[row] = rounding * rstd;
    }
  }
}

// The moments of a row whose squares overflow, or that is not finite, shrunk and relative to `shift`: from memory, by
// kLanes lanes alone, to the same bits in each. Hardly any row is such, and it must not cost the others barriers or
// registers. A lane has many elements, so that sums are double.
template <int kLanes, class T, class S>
__device__ Moments<S> shrunk_moments(const T* x_row, std::int64_t columns, S shift, S in_row) {
  double mean = 0;
  double sum = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // the mean, the squares
    mean = sum * in_row;
    sum = 0;
#pragma unroll 4
    for (std::int64_t column = threadIdx.x % kLanes; column < columns; column += kLanes) {
      const double difference = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift) - mean;
      sum += pass == 0 ? difference : difference * difference;
    }
    sum = sum_lanes<kLanes>(sum);
  }
  return {static_cast<S>(mean), static_cast<S>(sum)};
}

/// Rows that stream through shared memory. False, and nothing is done: not for rows of this length or alignment, or not
/// for this chip.
template <class T, class W>
bool forward_stream(const Forward<T, W>& a);

}  // namespace mica::kernels::layer_norm_cuda
