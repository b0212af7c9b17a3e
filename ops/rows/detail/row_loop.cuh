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

/// Reads the same row of kRows matrices, V columns at a time. Calls f(column, packs, count) for each batch of the
/// thread: packs[i][k], for i < count, is pack i of matrix k, which begins kLoopThreads · i packs after `column`.
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

/// Reads the elements first, first + step, … < end of a row of kRows matrices. Calls f(i, elements, inside) for each
/// batch of N, the first of which is at i: elements[n].at[k] is number n of matrix k in the type of sums, or `absent`
/// past the end, where inside(n) is false.
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

/// A row of any alignment as aligned packs of 16 bytes, and its unaligned ends: the few elements before the first and
/// after the last pack.
template <class T>
struct PeeledRow {
  static constexpr int kPack = 16 / sizeof(T);

  int head;  // elements before the first pack
  std::int64_t packs;
  std::int64_t columns;

  __device__ PeeledRow(const T* row, std::int64_t columns) : columns(columns) {
    const int offset = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
    const int before = offset == 0 ? 0 : kPack - offset;
    head = before < columns ? before : static_cast<int>(columns);
    packs = (columns - head) / kPack;
  }

  /// The first column of a pack.
  __device__ std::int64_t first(std::int64_t pack) const { return head + pack * kPack; }

  /// Calls f(i) with the column i of the ends that belongs to thread t, if there is one: the ends have fewer elements
  /// than a warp has threads.
  template <class F>
  __device__ void for_end(int t, const F& f) const {
    if (t < static_cast<int>(columns - packs * kPack)) {
      f(t < head ? t : t + packs * kPack);
    }
  }
};

/// Calls f(pack, i) for the packs of thread t of `threads`, and for its element of the ends as a pack of one; i is the
/// first column. It loads kAhead packs before it uses the first.
template <int kAhead, class T, class F>
__device__ void for_peeled_packs(const T* row, std::int64_t columns, int t, int threads, const F& f) {
  constexpr int kPack = PeeledRow<T>::kPack;
  const PeeledRow<T> peeled(row, columns);
  const T* const from = row + peeled.head;
  for (std::int64_t i = t; i < peeled.packs; i += std::int64_t{kAhead} * threads) {
    cuda::Pack<T, kPack> packs[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t number = i + std::int64_t{a} * threads;
      if (number < peeled.packs) {
        packs[a] = cuda::load<kPack>(from + number * kPack);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t number = i + std::int64_t{a} * threads;
      if (number < peeled.packs) {
        f(packs[a], peeled.first(number));
      }
    }
  }
  peeled.for_end(t, [&](std::int64_t i) { f(cuda::load<1>(row + i), i); });
}

}  // namespace mica::kernels::rows
