#pragma once

// Parts of backward's kernels for rows in registers: a thread's columns and elements, the sums over a row, and the sums
// over rows. V is the number of columns in a pack.

#include <cstdint>

#include <mica/ops/norm/detail/norm_backward_cuda.cuh>
#include <mica/ops/rows/detail/row_group.cuh>

namespace mica::kernels::norm_cuda {

/// A block of kBlock threads processes kRows rows at once. kThreads threads share a row, and each has kElements of its
/// elements in registers.
template <int kThreads_, int kBlock_, int kElements_>
struct BlockLayout {
  static constexpr int kThreads = kThreads_;
  static constexpr int kBlock = kBlock_;
  static constexpr int kElements = kElements_;
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kColumns = kThreads * kElements;  // the longest row that fits
  static constexpr int kWarps = kBlock / kWarp;
  static constexpr bool kOneWarp = kThreads <= kWarp;  // shuffles in a warp are enough to add up the sums of a row
  static constexpr int kLanes = kOneWarp ? kThreads : kWarp;
  static_assert(kOneWarp || kRows == 1);
};

/// Calls f(i, column, inside) for each of the thread's packs: pack i begins at `column`, and is part of the row if
/// `inside`.
template <class L, int V, class F>
__device__ void for_columns(std::int64_t columns, F f) {
  const int lane = threadIdx.x % L::kThreads;
  const int end = static_cast<int>(columns < L::kColumns ? columns : L::kColumns);
#pragma unroll
  for (int i = 0; i < L::kElements / V; ++i) {
    const int column = (i * L::kThreads + lane) * V;
    f(i, column, column < end);
  }
}

/// Loads the thread's packs of a row; those past its end are zeros.
template <class L, int V, class T>
__device__ void load_packs_of(const T* row, std::int64_t columns, Pack<T, V> (&packs)[L::kElements / V]) {
  for_columns<L, V>(columns, [&](int i, int column, bool inside) {
    if (inside) {
      packs[i] = load<V>(row + column);
    } else {
      packs[i] = {};
    }
  });
}

/// The sums over a row: Σ g · x̂ and, if centered, before it Σ g.
template <bool kCentered, class S>
using GradientSums = RowSums<S, kCentered ? 2 : 1>;

// A thread's sums over its rows, for each of its columns.
template <bool kCentered, class S, class L>
struct ColumnSums {
  S dweight[L::kElements] = {};
  S dbias[kCentered ? L::kElements : 1] = {};

  __device__ void add(int k, S dy, S x_hat) {
    dweight[k] += dy * x_hat;
    if constexpr (kCentered) {
      dbias[k] += dy;
    }
  }
};

// A thread's elements of a row. Those past the row's end are zeros.
template <bool kCentered, class T, class L, int V>
struct Elements {
  using S = Accumulate<T>;
  using Sums = GradientSums<kCentered, S>;
  static constexpr int kPacks = L::kElements / V;
  S x_hat[L::kElements];
  S g[L::kElements];

  // Sets the elements, and adds them to the sums over the row (`sums`) and over rows (`columns`).
  template <class W>
  __device__ void set(const Pack<T, V> (&xs)[kPacks], const Pack<T, V> (&dys)[kPacks],
                      const Pack<W, V> (&weights)[kPacks], const Statistics<T, kCentered>& statistics, Sums& sums,
                      ColumnSums<kCentered, S, L>& columns) {
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
      const S dy = static_cast<S>(dys[k / V].at[k % V]);
      x_hat[k] = statistics.x_hat(static_cast<S>(xs[k / V].at[k % V]));
      g[k] = dy * static_cast<S>(weights[k / V].at[k % V]);
      if constexpr (kCentered) {
        sums.at[0] += g[k];
      }
      sums.at[kCentered] += g[k] * x_hat[k];
      columns.add(k, dy, x_hat[k]);
    }
  }

  // dx of element number k. `means` are the means over the row.
  __device__ S dx(int k, const Sums& means, S rstd) const {
    const S centered = kCentered ? g[k] - means.at[0] : g[k];
    return (centered - x_hat[k] * means.at[kCentered]) * rstd;
  }

  __device__ Pack<T, V> dx_pack(int i, const Sums& means, S rstd) const {
    S values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = dx(i * V + j, means, rstd);
    }
    return pack_of<T>(values);
  }
};

// Writes the block's row of partial sums. Threads with the same columns of different rows first add up their sums.
template <class L, int V, class S>
__device__ void write_partial(S* partials, std::int64_t columns, S (&mine)[L::kElements], S* shared) {
  S* const partial = partials + blockIdx.x * columns;
  if constexpr (L::kRows == 1) {
    for_columns<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          partial[column + j] = mine[i * V + j];
        }
      }
    });
  } else {
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
#pragma unroll
      for (int step = L::kThreads; step < kWarp; step *= 2) {
        mine[k] += __shfl_xor_sync(kAllLanes, mine[k], step);
      }
    }
    __syncthreads();  // no thread still reads the previous contents of `shared`
    if (threadIdx.x % kWarp < L::kThreads) {
      S* const own = shared + threadIdx.x / kWarp * L::kColumns;
      for_columns<L, V>(columns, [&](int i, int column, bool) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          own[column + j] = mine[i * V + j];
        }
      });
    }
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += L::kBlock) {
      S sum = 0;
#pragma unroll
      for (int warp = 0; warp < L::kWarps; ++warp) {
        sum += shared[warp * L::kColumns + column];
      }
      partial[column] = sum;
    }
  }
}

template <bool kCentered, class T, class W, class L, int V, class S>
__device__ void write_partials(const BackwardRows<T, W>& a, ColumnSums<kCentered, S, L>& sums, S* shared) {
  if (a.dweights != nullptr) {
    write_partial<L, V>(a.dweights, a.columns, sums.dweight, shared);
  }
  if constexpr (kCentered) {
    if (a.dbiases != nullptr) {
      write_partial<L, V>(a.dbiases, a.columns, sums.dbias, shared);
    }
  }
}

// Loads the weights of the thread's packs; those past the end of the row are zeros.
template <class L, int V, class W>
__device__ void load_weights(const W* weight, std::int64_t columns, Pack<W, V> (&packs)[L::kElements / V]) {
  for_columns<L, V>(columns, [&](int i, int column, bool inside) {
    packs[i] = {};
    if (inside) {
      packs[i] = load_or<V>(weight, column, 1);
    }
  });
}

// The same with a single test of whether there are weights, so that no load waits for a branch. Past the row's end,
// weights may be ones instead of zeros.
template <class L, int V, class W>
__device__ void load_weights_at_once(const W* weight, std::int64_t columns, Pack<W, V> (&packs)[L::kElements / V]) {
  const bool ones = weight == nullptr;
  for_columns<L, V>(columns, [&](int i, int column, bool inside) {
    packs[i] = {};
    if (inside && !ones) {
      packs[i] = load<V>(weight + column);
    }
  });
  if (ones) {
#pragma unroll
    for (Pack<W, V>& pack : packs) {
#pragma unroll
      for (W& value : pack.at) {
        value = static_cast<W>(1.0f);
      }
    }
  }
}

}  // namespace mica::kernels::norm_cuda
