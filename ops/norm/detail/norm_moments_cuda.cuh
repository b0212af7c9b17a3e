#pragma once

// The mean and the sum of squares of a row, from the parts that its threads have.

#include <type_traits>

#include <mica/ops/rows/detail/row_group.cuh>
#include <mica/ops/rows/detail/row_tile.cuh>

namespace mica::kernels::norm_cuda {

template <class S>
__device__ S reciprocal(S n) {
  return n > 0 ? S(1) / n : S(0);
}

/// The mean of `count` elements, relative to the row's shift, and Σ (x − shift − mean)². They are combined by Chan's
/// formula.
template <class S>
struct Moments {
  using Number = S;
  static constexpr int kNumbers = 3;

  S mean;
  S squares;
  S count;

  __device__ Moments empty() const { return {0, 0, 0}; }
  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, mean);
    f(1, squares);
    f(2, count);
  }
  __device__ void join(const Moments& other) {
    const S total = count + other.count;
    const S difference = other.mean - mean;
    const S share = other.count * reciprocal(total);
    mean = fma(difference, share, mean);
    squares += fma(difference * difference, count * share, other.squares);
    count = total;
  }
  /// Combines read(0) to read(n − 1). Unlike join(), it divides only once.
  template <class Read>
  __device__ static Moments over_parts(int n, const Read& read) {
    const int lane = static_cast<int>(threadIdx.x) % rows::kWarp;
    Moments all{};
#pragma unroll 2
    for (int i = lane; i < n; i += rows::kWarp) {
      const Moments part = read(i);
      all.mean = fma(part.count, part.mean, all.mean);
      all.count += part.count;
    }
    all.count = cuda::sum_lanes<rows::kWarp>(all.count);
    all.mean = cuda::sum_lanes<rows::kWarp>(all.mean) * reciprocal(all.count);
#pragma unroll 2
    for (int i = lane; i < n; i += rows::kWarp) {
      const Moments part = read(i);
      const S difference = part.mean - all.mean;
      all.squares += fma(part.count * difference, difference, part.squares);
    }
    all.squares = cuda::sum_lanes<rows::kWarp>(all.squares);
    return all;
  }
  template <int kLanes>
  __device__ Moments over_lanes() const {
    const S total = cuda::sum_lanes<kLanes>(count);
    const S all = cuda::sum_lanes<kLanes>(count * mean) * reciprocal(total);
    const S difference = mean - all;
    return {all, cuda::sum_lanes<kLanes>(fma(count * difference, difference, squares)), total};
  }
};

/// A row's mean relative to its shift, and Σ (x − shift − mean)².
template <class S>
struct MeanAndSquares {
  S mean;
  S squares;
};

/// How the moments of a row are computed: relative to a shift that is close to its elements, in one pass or two.
///
/// - In one pass, for packs of 16-bit elements: Σ (x − shift) and Σ (x − shift)², where the shift is the mean of the
///   row's first 8 elements. The latter is at most 1 + N / 8 times as large as Σ (x − mean)², so float32 has enough
///   bits.
/// - In two passes, for other elements: each thread's mean of x − shift, and then its Moments.
///
/// Norms that are not centered need only Σ x². Their shift is 0.
template <class T, int V, bool kCentered>
struct MomentsOf {
  using S = Accumulate<T>;
  static constexpr bool kOnePass = sizeof(T) == 2 && V > 1;
  // The number of elements at the beginning of a row whose mean is the row's shift.
  static constexpr int kFirst = kOnePass ? 8 : 1;
  using Value = std::conditional_t<!kCentered, rows::RowSums<S, 1>,
                                   std::conditional_t<kOnePass, rows::RowSums<S, 2>, Moments<S>>>;
};

/// The shift of a row whose first elements are `first`: the mean of these elements.
template <class T, int V>
__device__ Accumulate<T> shift_of(const rows::Pack<T, V>& first) {
  using S = Accumulate<T>;
  S values[V];
  cuda::unpack(first, values);
  S shift = 0;
#pragma unroll
  for (const S value : values) {
    shift = fma(value, S(1.0 / V), shift);
  }
  return shift;
}

}  // namespace mica::kernels::norm_cuda
