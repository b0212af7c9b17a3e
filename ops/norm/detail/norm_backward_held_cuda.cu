#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward_staging_cuda.cuh>

// Backward for rows that do not stream: short ones, 16-bit ones that packs do not fit, float64, and all on chips before
// compute capability 9.0.
//
// Rows that fit in the registers of their threads (stage 1):
//
//     x, dy ──▶ registers ──▶ Σ g, Σ g · x̂ ──exchange──▶ dx
//                   └──▶ dweight, dbias of the thread's columns, for all rows of the block ──▶ a row of partials
//
// Longer ones are read twice for dx, piece by piece, and dweight and dbias have a kernel of their own.

namespace mica::kernels::norm_cuda {

namespace {

template <class S>
struct Sums {
  S g;   // Σ g, g = dy · weight; 0 if x̂ is not centered
  S gx;  // Σ g · x̂
};

// Both over a row, from those of its threads, divided by its length.
template <bool kCentered, class L, class S>
__device__ Sums<S> row_means(const Sums<S>& mine, std::int64_t columns, Exchange<Sums<S>, L>& exchange) {
  const auto sum = [&]<int kLanes>(const Sums<S>& of_lane) {
    return Sums<S>{kCentered ? sum_lanes<kLanes>(of_lane.g) : S(0), sum_lanes<kLanes>(of_lane.gx)};
  };
  Sums<S> row = sum.template operator()<L::kLanes>(mine);
  if constexpr (!L::kOneWarp) {
    row = sum.template operator()<kWarp>(exchange.swap(row, {0, 0}));
  }
  const S length = static_cast<S>(columns);
  return {kCentered ? row.g / length : S(0), row.gx / length};
}

// What a thread's columns of all its rows add up to.
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

struct NoColumnSums {
  template <class S>
  __device__ void add(int, S, S) {}
};

// A thread's elements of a row, or of a piece of one: zeros where it has none.
template <bool kCentered, class T, class L, int V>
struct Elements {
  using S = Accumulate<T>;
  S x_hat[L::kElements];
  S g[L::kElements];

  // Sets those of pack number i, and adds them to the row's sums and to the columns'.
  template <class W, class Columns>
  __device__ void set(int i, const Pack<T, V>& x, const Pack<T, V>& dys, const Pack<W, V>& weight,
                      const Statistics<T, kCentered>& statistics, Sums<S>& sums, Columns& columns) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int k = i * V + j;
      const S dy = static_cast<S>(dys.at[j]);
      x_hat[k] = statistics.x_hat(static_cast<S>(x.at[j]));
      g[k] = dy * static_cast<S>(weight.at[j]);
      if constexpr (kCentered) {
        sums.g += g[k];
      }
      sums.gx += g[k] * x_hat[k];
      columns.add(k, dy, x_hat[k]);
    }
  }

  // Of element number k; means are those of the row's sums.
  __device__ S dx(int k, const Sums<S>& means, S rstd) const {
    const S centered = kCentered ? g[k] - means.g : g[k];
    return (centered - x_hat[k] * means.gx) * rstd;
  }

  __device__ Pack<T, V> dx_pack(int i, const Sums<S>& means, S rstd) const {
    S values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = dx(i * V + j, means, rstd);
    }
    return pack_of<T>(values);
  }
};

// Writes the block's row of partials: the sum of its threads' `mine` over the rows they work on at once.
template <class L, int V, class S>
__device__ void write_partial(S* partials, std::int64_t columns, S (&mine)[L::kElements], S* shared) {
  S* const partial = partials + blockIdx.x * columns;
  if constexpr (L::kRows == 1) {
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
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
    __syncthreads();  // whoever read `shared` before is done
    if (threadIdx.x % kWarp < L::kThreads) {
      S* const own = shared + threadIdx.x / kWarp * L::kColumns;
      for_packs<L, V>(columns, [&](int i, int column, bool) {
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

// The weights of the thread's share of a row, from column `begin` on; zeros past its end.
template <class L, int V, class W>
__device__ void load_weights(const W* weight, std::int64_t begin, std::int64_t columns,
                             Pack<W, V> (&packs)[L::kElements / V]) {
  for_packs<L, V>(columns, [&](int i, int column, bool inside) {
    packs[i] = {};
    if (inside) {
      packs[i] = load_or<V>(weight, begin + column, 1);
    }
  });
}

// The same for threads with few registers left: whether there are weights is asked once, so that no load waits for a
// branch. Past the row's end they may be ones.
template <class L, int V, class W>
__device__ void load_weights_at_once(const W* weight, std::int64_t columns, Pack<W, V> (&packs)[L::kElements / V]) {
  const bool ones = weight == nullptr;
  for_packs<L, V>(columns, [&](int i, int column, bool inside) {
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

// Blocks that a multiprocessor has to have room for.
template <class L>
constexpr int kHeldBlocks = L::kRows > 1 && L::kElements == 16 ? 3 : 1;

// Rows in registers. Which rows a block takes is fixed; a thread meets the same columns in each.
template <bool kCentered, class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, kHeldBlocks<L>) norm_backward_held_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Sums<S>, L>::Shared shared;
  __shared__ S fold[L::kRows > 1 ? L::kWarps * L::kColumns : 1];
  Exchange<Sums<S>, L> exchange(shared);
  ColumnSums<kCentered, S, L> column_sums;
  const std::int64_t step = std::int64_t{gridDim.x} * L::kRows;
  for (std::int64_t first = std::int64_t{blockIdx.x} * L::kRows; first < a.rows; first += step) {
    const std::int64_t row = first + threadIdx.x / L::kThreads;
    const bool present = L::kRows == 1 || row < a.rows;  // else the thread only takes part in what warps do together
    const std::int64_t columns = present ? a.columns : 0;
    const std::int64_t begin = row * a.columns;
    const auto statistics = a.template statistics<kCentered>(row, present);
    Pack<T, V> dys[L::kElements / V];
    Pack<T, V> xs[L::kElements / V];
    load_share<L, V>(a.dy + begin, columns, dys);
    load_share<L, V>(a.x + begin, columns, xs);
    Pack<W, V> weights[L::kElements / V];
    if constexpr (kCentered || V == 1) {
      load_weights<L, V>(a.weight, 0, columns, weights);
    } else {
      load_weights_at_once<L, V>(a.weight, columns, weights);
    }
    Elements<kCentered, T, L, V> elements;
    Sums<S> mine{0, 0};
#pragma unroll
    for (int i = 0; i < L::kElements / V; ++i) {
      elements.set(i, xs[i], dys[i], weights[i], statistics, mine, column_sums);
    }
    const Sums<S> means = row_means<kCentered>(mine, a.columns, exchange);
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
        store(a.dx + begin + column, elements.dx_pack(i, means, statistics.rstd));
      }
    });
  }
  write_partials<kCentered, T, W, L, V>(a, column_sums, fold);
}

// The same for rows of single elements, with the same results: rows to come are on their way into shared memory, and dx
// leaves through it, in the aligned units of 16 bytes in which they lie.
template <bool kCentered, class T, class W, class L, int kBlocks>
__global__ void __launch_bounds__(L::kBlock, kBlocks) norm_backward_staged_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Sums<S>, L>::Shared shared;
  extern __shared__ __align__(16) unsigned char memory[];
  Exchange<Sums<S>, L> exchange(shared);
  ColumnSums<kCentered, S, L> column_sums;
  Pack<W, 1> weights[L::kElements];
  load_weights<L, 1>(a.weight, 0, a.columns, weights);
  std::int64_t row = blockIdx.x;
  RowStaging<T, W, L> staging(a, row, memory);
  auto next_statistics = a.template statistics<kCentered>(row, row < a.rows);
  for (; row < a.rows; row += gridDim.x) {
    const auto statistics = next_statistics;
    next_statistics = a.template statistics<kCentered>(row + gridDim.x, row + gridDim.x < a.rows);
    staging.open(row);
    Pack<T, 1> xs[L::kElements];
    Pack<T, 1> dys[L::kElements];
    staging.load(row, xs, dys);
    Elements<kCentered, T, L, 1> elements;
    Sums<S> mine{0, 0};
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
      elements.set(k, xs[k], dys[k], weights[k], statistics, mine, column_sums);
    }
    const Sums<S> means = row_means<kCentered>(mine, a.columns, exchange);
    staging.write(row, [&](int k) { return elements.dx_pack(k, means, statistics.rstd).at[0]; });
  }
  write_partials<kCentered, T, W, L, 1>(a, column_sums, static_cast<S*>(nullptr));
}

// dx alone: each row by one block that reads it twice, piece by piece.
template <bool kCentered, class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) norm_backward_looped_kernel(const BackwardRows<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Sums<S>, L>::Shared shared;
  Exchange<Sums<S>, L> exchange(shared);
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const auto statistics = a.template statistics<kCentered>(row);
    const auto load_piece = [&](std::int64_t begin, Elements<kCentered, T, L, V>& elements) {
      Pack<T, V> dys[L::kElements / V];
      Pack<T, V> xs[L::kElements / V];
      Pack<W, V> weights[L::kElements / V];
      load_share<L, V>(a.dy + row * a.columns + begin, a.columns - begin, dys);
      load_share<L, V>(a.x + row * a.columns + begin, a.columns - begin, xs);
      load_weights<L, V>(a.weight, begin, a.columns - begin, weights);
      Sums<S> sums{0, 0};
      NoColumnSums none;
#pragma unroll
      for (int i = 0; i < L::kElements / V; ++i) {
        elements.set(i, xs[i], dys[i], weights[i], statistics, sums, none);
      }
      return sums;
    };
    Sums<S> mine{0, 0};
    for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
      Elements<kCentered, T, L, V> elements;
      const Sums<S> piece = load_piece(begin, elements);
      mine.g += piece.g;
      mine.gx += piece.gx;
    }
    const Sums<S> means = row_means<kCentered>(mine, a.columns, exchange);
    for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
      Elements<kCentered, T, L, V> elements;
      load_piece(begin, elements);
      for_packs<L, V>(a.columns - begin, [&](int i, int column, bool inside) {
        if (inside) {
          store(a.dx + row * a.columns + begin + column, elements.dx_pack(i, means, statistics.rstd));
        }
      });
    }
  }
}

// Calls f with the layout that held_layout() chooses.
template <class T, bool kInPacks, bool kCentered, class F>
void with_layout(std::int64_t columns, F&& f) {
  constexpr int kMost = kMostHeld<Accumulate<T>>;
  const HeldLayout layout = held_layout(columns, sizeof(T), kInPacks, kCentered);
  bool done = false;
  const auto run = [&]<class L>(L choice) {
    if (!done && layout.threads == L::kThreads && layout.block == L::kBlock && layout.elements == L::kElements) {
      done = true;
      f(choice);
    }
  };
  run(Layout<8, 256, 8>{});
  run(Layout<32, 256, 8>{});
  run(Layout<128, 128, 8>{});
  run(Layout<256, 256, kMost>{});
  run(Layout<512, 512, kMost>{});
  if constexpr (kInPacks && kCentered && sizeof(T) == 2) {
    run(Layout<16, 256, 8>{});
  } else if constexpr (kInPacks && kCentered && sizeof(T) == 4) {
    run(Layout<32, 256, 4>{});
  } else if constexpr (kInPacks) {
    run(Layout<128 / kMost, 256, kMost>{});
    run(Layout<256 / kMost, 256, kMost>{});
  }
  check(done, "norm_backward: there is no layout for rows of {}", columns);
}

// Calls f with the layout that staged_layout() chooses, and its blocks on a multiprocessor.
template <class T, class F>
void with_staged_layout(std::int64_t columns, F&& f) {
  bool done = false;
  const auto run = [&]<int kThreads, int kBlock, int kElements>() {
    constexpr std::int64_t kLongest = std::int64_t{kThreads} * kElements;
    if (!done && columns <= kLongest) {
      constexpr StagedLayout kLayout = staged_layout(kLongest);
      static_assert(kLayout.held.threads == kThreads && kLayout.held.block == kBlock &&
                    kLayout.held.elements == kElements);
      done = true;
      f.template operator()<Layout<kThreads, kBlock, kElements>, kLayout.blocks>();
    }
  };
  run.template operator()<128, 128, 3>();
  run.template operator()<128, 128, 4>();
  run.template operator()<128, 128, 6>();
  run.template operator()<128, 128, 7>();
  run.template operator()<128, 128, 8>();
  run.template operator()<256, 256, 8>();
  run.template operator()<256, 256, 16>();
  run.template operator()<512, 512, 16>();
  check(done, "norm_backward: rows of {} are not staged", columns);
}

// Calls f with an integral_constant: the columns that are read at once.
template <class T, class F>
void with_pack(int pack, F&& f) {
  if (pack == 1) {
    f(std::integral_constant<int, 1>{});
  } else {
    f(std::integral_constant<int, 16 / sizeof(T)>{});
  }
}

}  // namespace

template <bool kCentered, class T, class W>
void backward_held(const BackwardRows<T, W>& a, const NormBackwardPlan& plan) {
  with_pack<T>(plan.pack, [&]<int V>(std::integral_constant<int, V>) {
    constexpr bool kInPacks = V > 1;
    with_layout<T, kInPacks, kCentered>(a.columns, [&]<class L>(L) {
      norm_backward_held_kernel<kCentered, T, W, L, V>
          <<<grid_of(plan.partial_rows), L::kBlock, 0, cuda::current_stream()>>>(a);
      cuda::check_launch("norm_backward_held_kernel");
    });
  });
}

template <bool kCentered, class T, class W>
void backward_staged(const BackwardRows<T, W>& a, const NormBackwardPlan& plan) {
  if constexpr (sizeof(T) == 2) {
    with_staged_layout<T>(a.columns, [&]<class L, int kBlocks>() {
      cuda::Launch(grid_of(plan.partial_rows), L::kBlock, RowStaging<T, W, L>::kBytes)
          .run(norm_backward_staged_kernel<kCentered, T, W, L, kBlocks>, "norm_backward_staged_kernel", a);
    });
  }
}

template <bool kCentered, class T, class W>
void backward_looped(const BackwardRows<T, W>& a, const NormBackwardPlan& plan) {
  using L = Layout<1024, 1024, 8>;
  with_pack<T>(plan.pack, [&]<int V>(std::integral_constant<int, V>) {
    norm_backward_looped_kernel<kCentered, T, W, L, V><<<grid_of(a.rows), L::kBlock, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("norm_backward_looped_kernel");
  });
}

#define MICA_INSTANTIATE(T, W)                                                              \
  template void backward_held<true>(const BackwardRows<T, W>&, const NormBackwardPlan&);    \
  template void backward_held<false>(const BackwardRows<T, W>&, const NormBackwardPlan&);   \
  template void backward_staged<true>(const BackwardRows<T, W>&, const NormBackwardPlan&);  \
  template void backward_staged<false>(const BackwardRows<T, W>&, const NormBackwardPlan&); \
  template void backward_looped<true>(const BackwardRows<T, W>&, const NormBackwardPlan&);  \
  template void backward_looped<false>(const BackwardRows<T, W>&, const NormBackwardPlan&)
MICA_FOR_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::norm_cuda
