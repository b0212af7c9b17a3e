#pragma once

// Rows of any length and alignment, which are read again for each pass:
//
//     global memory ──a batch of loads──▶ registers ──▶ a part of a sum, or results

#include <cstdint>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/dtype.h>

namespace mica::kernels::rows {

inline constexpr int kLoopThreads = 512;  // per block

/// The packs that a thread loads before it uses the first of them.
template <int V>
constexpr int kBatch = V == 1 ? 8 : 4;

/// Reads the same row of kRows matrices, V columns at a time. Calls f(column, packs, count) for each of the thread's
/// batches: packs[i][k] is its pack number i of matrix k, for i < count. Pack 0 begins at `column`, and the others
/// follow kLoopThreads packs apart.
template <int V, int kRows, class T, class F>
__device__ void for_batches(const T* const (&rows)[kRows], std::int64_t columns, const F& f) {
  constexpr int kStep = kLoopThreads * V;
#pragma unroll 1
  for (std::int64_t column = threadIdx.x * V; column < columns; column += kBatch<V> * kStep) {
    const std::int64_t packs_left = (columns - column + kStep - 1) / kStep;
    const int count = packs_left < kBatch<V> ? static_cast<int>(packs_left) : kBatch<V>;
    cuda::Pack<T, V> packs[kBatch<V>][kRows];
#pragma unroll
    for (int i = 0; i < kBatch<V>; ++i) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (i < count) {
          packs[i][k] = cuda::load<V>(rows[k] + column + i * kStep);
        } else {
          packs[i][k] = {};
        }
      }
    }
    f(column, packs, count);
  }
}

/// The same, with f(column, packs) for each pack: packs[k] is that of matrix k.
template <int V, int kRows, class T, class F>
__device__ void for_packs(const T* const (&rows)[kRows], std::int64_t columns, const F& f) {
  for_batches<V>(rows, columns, [&](std::int64_t column, const cuda::Pack<T, V>(&packs)[kBatch<V>][kRows], int count) {
#pragma unroll
    for (int i = 0; i < kBatch<V>; ++i) {
      if (i < count) {
        f(column + i * (kLoopThreads * V), packs[i]);
      }
    }
  });
}

/// Reads single elements of a row of kRows matrices: those at first, first + step, … < end. Calls f(i, elements,
/// inside) for each batch of N elements, the first of which is at i; elements[n].at[k] is number n of matrix k, in the
/// type of sums. Past the end, inside(n) is false, and elements are `absent`.
template <int N, int kRows, class T, class F, class S = Accumulate<T>>
__device__ void for_strided(const T* const (&rows)[kRows], std::int64_t first, std::int64_t end, std::int64_t step,
                            S absent, const F& f) {
#pragma unroll 1
  for (std::int64_t i = first; i < end; i += N * step) {
    const auto inside = [&](int n) { return i + n * step < end; };
    cuda::Pack<S, kRows> elements[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        elements[n].at[k] = inside(n) ? static_cast<S>(rows[k][i + n * step]) : absent;
      }
    }
    f(i, elements, inside);
  }
}

}  // namespace mica::kernels::rows
