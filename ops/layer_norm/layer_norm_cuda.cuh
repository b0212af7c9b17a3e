#pragma once

// What the CUDA kernels of layer_norm share. T is the type of x, y, dy and dx, W that of the parameters, S that of
// sums: float, or double for double.

#include <cstdint>

#include <mica/ops/layer_norm/rows_cuda.cuh>

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
  T* y;
  S* mean;
  S* rstd;
};

// Brings a row whose squares overflow into range; a power of 2, so that it rounds nothing.
template <class S>
constexpr S kShrink = std::is_same_v<S, double> ? S(0x1p-600) : S(0x1p-80);

// `count` numbers: their mean and the sum of the squares of their differences from it.
template <class S>
struct Moments {
  S count;
  S mean;
  S m2;
};

// How many numbers, and its reciprocal: divided once, outside the loops (0 of 0).
template <class S>
struct Count {
  S n;
  S reciprocal;

  __device__ explicit Count(S n) : n(n), reciprocal(n > 0 ? S(1) / n : S(0)) {}
};

// Those of kLanes lanes together.
template <int kLanes, class S>
__device__ Moments<S> combine_lanes(const Moments<S>& mine, const Count<S>& count) {
  const S mean = sum_lanes<kLanes>(mine.count * mine.mean) * count.reciprocal;
  const S difference = mine.mean - mean;
  return {count.n, mean, sum_lanes<kLanes>(mine.m2 + mine.count * difference * difference)};
}

template <class T, class W>
struct Backward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* dy;
  const T* x;
  const W* weight;
  const S* mean;
  const S* rstd;
  T* dx;        // null, as the next two may be: not wanted
  S* dweights;  // (G, N)
  S* dbiases;   // (G, N)
};

template <class S>
struct Sums {
  S g;   // Σ g, g = dy · weight
  S gx;  // Σ g · x̂
};

/// Rows that stream through shared memory, layer_norm_*_ring_cuda.cu. False: not for this shape, alignment or chip, and
/// nothing was done.
template <class T, class W>
bool forward_ring(const Forward<T, W>& a);

/// Stage 1 of backward, likewise. How many rows of partials it writes; 0: not for this shape, alignment or chip.
template <class T, class W>
std::int64_t backward_ring_partial_rows(const Backward<T, W>& a);

template <class T, class W>
void backward_ring(const Backward<T, W>& a, std::int64_t partial_rows);

}  // namespace mica::kernels::layer_norm_cuda
