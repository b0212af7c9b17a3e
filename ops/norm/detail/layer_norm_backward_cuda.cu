#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/layer_norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/layer_norm_kernels.h>

// T is the type of x, dy and dx, W that of the parameters, S that of sums: float, or double for double.
// Stage 1 writes dx and G rows of partial dweight and dbias, stage 2 adds those up. Rows too long for a stage 1 have a
// kernel for dx, and then that for the parameters alone.

namespace mica::kernels {

namespace layer_norm_cuda {

using namespace rows;

namespace {

template <class S>
constexpr int kWide = 64 / sizeof(S);  // what a thread can hold of a row, and of its sums, without spilling
template <class S>
constexpr std::int64_t kLongestRow = 512 * kWide<S>;  // that fits in the registers of a block

/// The choice of stage 1 by row length, for rows that fit in registers: f(layout).
template <class S, class F>
void backward_layout(std::int64_t columns, F&& f) {
  if (columns <= 64) {
    f(Layout<8, 256, 8>{});
  } else if (columns <= 256) {
    f(Layout<32, 256, 8>{});
  } else if (columns <= 1024) {
    f(Layout<128, 128, 8>{});
  } else if (columns <= 256 * kWide<S>) {
    f(Layout<256, 256, kWide<S>>{});
  } else {
    f(Layout<512, 512, kWide<S>>{});
  }
}

// G, the rows of partials. A function of the shape alone, so that results do not depend on the GPU: enough blocks to
// keep a large one busy, few enough that the partials stay small beside x.
template <class L>
std::int64_t partial_rows(std::int64_t rows) {
  constexpr std::int64_t kMost = (L::kRows > 1 ? 131072 : 65536) / L::kBlock;
  return std::min((rows + L::kRows - 1) / L::kRows, kMost);
}

template <class S>
struct Sums {
  S g;   // Σ g, g = dy · weight
  S gx;  // Σ g · x̂
};

// Both over a row, from those of its threads.
template <class L, class S>
__device__ Sums<S> sum_row(const Sums<S>& mine, Exchange<Sums<S>, L>& exchange) {
  const Sums<S> warp{sum_lanes<L::kLanes>(mine.g), sum_lanes<L::kLanes>(mine.gx)};
  if constexpr (L::kOneWarp) {
    return warp;
  } else {
    const Sums<S> other = exchange.swap(warp, {0, 0});
    return {sum_lanes<kWarp>(other.g), sum_lanes<kWarp>(other.gx)};
  }
}

// The thread's share of a row, or of a piece of it that starts at column `begin`; zeros past its end.
template <class T, class W, class L, int V>
struct Share {
  using S = Accumulate<T>;
  S dy[L::kElements];
  S g[L::kElements];
  S x_hat[L::kElements];

  __device__ Sums<S> load(const Backward<T, W>& a, std::int64_t row, std::int64_t begin, std::int64_t columns,
                          const Statistics<T>& statistics) {
    Pack<T, V> dys[L::kElements / V];
    Pack<T, V> xs[L::kElements / V];
    Pack<W, V> weights[L::kElements / V];
    load_share<L, V>(a.dy + row * a.columns + begin, columns, dys);
    load_share<L, V>(a.x + row * a.columns + begin, columns, xs);
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
        weights[i] = load_or<V>(a.weight, begin + column, 1);
      } else {
        weights[i] = {};
      }
    });
    Sums<S> sums{0, 0};
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
      dy[k] = static_cast<S>(dys[k / V].at[k % V]);
      g[k] = dy[k] * static_cast<S>(weights[k / V].at[k % V]);
      x_hat[k] = statistics.x_hat(static_cast<S>(xs[k / V].at[k % V]));
      sums.g += g[k];
      sums.gx += g[k] * x_hat[k];
    }
    return sums;
  }

  __device__ void write_dx(const Backward<T, W>& a, std::int64_t row, std::int64_t begin, std::int64_t columns,
                           const Sums<S>& sums, S rstd) const {
    const S g_mean = sums.g / static_cast<S>(a.columns);
    const S gx_mean = sums.gx / static_cast<S>(a.columns);
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
        Pack<T, V> dx;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dx.at[j] = static_cast<T>((g[i * V + j] - g_mean - x_hat[i * V + j] * gx_mean) * rstd);
        }
        store(a.dx + row * a.columns + begin + column, dx);
      }
    });
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

// Stage 1 for rows that fit in registers. Which rows a block takes is fixed; a thread meets the same columns in each
// and keeps their dweight and dbias in registers.
template <class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) layer_norm_backward_kernel(const Backward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Sums<S>, L>::Shared shared;
  __shared__ S fold[L::kRows > 1 ? L::kWarps * L::kColumns : 1];
  Exchange<Sums<S>, L> exchange(shared);
  S dweight[L::kElements] = {};
  S dbias[L::kElements] = {};
  const std::int64_t step = std::int64_t{gridDim.x} * L::kRows;
  for (std::int64_t first = std::int64_t{blockIdx.x} * L::kRows; first < a.rows; first += step) {
    const std::int64_t row = first + threadIdx.x / L::kThreads;
    const bool present = L::kRows == 1 || row < a.rows;  // else the thread only takes part in what warps do together
    const std::int64_t columns = present ? a.columns : 0;
    const Statistics<T> statistics = a.statistics(row, present);
    Share<T, W, L, V> share;
    const Sums<S> mine = share.load(a, row, 0, columns, statistics);
#pragma unroll
    for (int k = 0; k < L::kElements; ++k) {
      dweight[k] += share.dy[k] * share.x_hat[k];
      dbias[k] += share.dy[k];
    }
    share.write_dx(a, row, 0, columns, sum_row<L>(mine, exchange), statistics.rstd);
  }
  if (a.dweights != nullptr) {
    write_partial<L, V>(a.dweights, a.columns, dweight, fold);
  }
  if (a.dbiases != nullptr) {
    write_partial<L, V>(a.dbiases, a.columns, dbias, fold);
  }
}

// dx alone, for rows of any length: each by one block that reads it twice, piece by piece.
template <class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) layer_norm_backward_dx_kernel(const Backward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Sums<S>, L>::Shared shared;
  Exchange<Sums<S>, L> exchange(shared);
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const Statistics<T> statistics = a.statistics(row);
    Sums<S> mine{0, 0};
    for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
      Share<T, W, L, V> share;
      const Sums<S> piece = share.load(a, row, begin, a.columns - begin, statistics);
      mine.g += piece.g;
      mine.gx += piece.gx;
    }
    const Sums<S> sums = sum_row<L>(mine, exchange);
    for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
      Share<T, W, L, V> share;
      share.load(a, row, begin, a.columns - begin, statistics);
      share.write_dx(a, row, begin, a.columns - begin, sums, statistics.rstd);
    }
  }
}

// Stage 2: out[c] = Σ partials[g][c], blockIdx.y = 0 for dweight and 1 for dbias. A block takes 32 columns; its warps
// deal out the rows and fold in order.
constexpr int kStage2Warps = 16;

template <class S, class W>
struct Stage2 {
  const S* partials;  // (G, N); null: not wanted
  W* out;             // (N)
};

template <class S, class W, class T>
__global__ void __launch_bounds__(kStage2Warps* kWarp)
    layer_norm_backward_sum_kernel(const Stage2<S, W> dweight, const Stage2<S, W> dbias, const Stage2<S, T> dx_sum,
                                   std::int64_t partial_rows, std::int64_t columns) {
  __shared__ S fold[kStage2Warps][kWarp];
  cuda::wait_for_previous_kernel();
  const S* const partials = blockIdx.y == 0 ? dweight.partials : blockIdx.y == 1 ? dbias.partials : dx_sum.partials;
  if (partials == nullptr) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarp + lane;
  S sum = 0;
  if (column < columns) {
#pragma unroll 9
    for (std::int64_t row = warp; row < partial_rows; row += kStage2Warps) {
      sum += partials[row * columns + column];
    }
  }
  fold[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < columns) {
    S total = 0;
#pragma unroll
    for (int i = 0; i < kStage2Warps; ++i) {
      total += fold[i][lane];
    }
    if (blockIdx.y == 2) {
      dx_sum.out[column] = static_cast<T>(total);
    } else {
      (blockIdx.y == 0 ? dweight.out : dbias.out)[column] = static_cast<W>(total);
    }
  }
}

template <class T, class W, class L>
void launch_stage1(const Backward<T, W>& a, std::int64_t partial_rows) {
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        layer_norm_backward_kernel<T, W, L, V><<<grid_of(partial_rows), L::kBlock, 0, cuda::current_stream()>>>(a);
        cuda::check_launch("layer_norm_backward_kernel");
      },
      a.dy, a.x, a.weight, a.dx);
}

template <class T, class W>
void launch_dx(const Backward<T, W>& a) {
  using L = Layout<1024, 1024, 8>;
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        layer_norm_backward_dx_kernel<T, W, L, V><<<grid_of(a.rows), L::kBlock, 0, cuda::current_stream()>>>(a);
        cuda::check_launch("layer_norm_backward_dx_kernel");
      },
      a.dy, a.x, a.weight, a.dx);
}

template <class T, class W>
void launch_backward(const LayerNormBackward& args) {
  using S = Accumulate<T>;
  Backward<T, W> a{.rows = args.rows,
                   .columns = args.columns,
                   .dy = args.dy.data_or_null<T>(),
                   .x = args.x.data_or_null<T>(),
                   .weight = args.weight.data_or_null<W>(),
                   .mean = args.mean.data_or_null<S>(),
                   .mean_rest = mean_rest_of<S>(args.mean),
                   .rstd = args.rstd.data_or_null<S>(),
                   .dx = args.dx.data_or_null<T>(),
                   .dweight = args.dweight.data_or_null<W>(),
                   .dbias = args.dbias.data_or_null<W>()};
  const Device device = args.x.device();
  Tensor zeros;
  if (has_mean_rest(sizeof(T)) && a.mean_rest == nullptr && args.rows > 0) {
    zeros = empty({args.rows}, dtype_of<S>, device);
    fill_data(zeros, 0);
    a.mean_rest = zeros.data<S>();
  }
  if (!args.dx.defined() || args.rows == 0) {
    return backward_parameters(a, device);
  }
  if constexpr (std::is_same_v<S, float>) {
    if (const std::int64_t G = stream_partial_rows(a); G > 0) {
      const Tensor partials = allocate_partials(a, G, device);
      backward_stream(a);
      return add_partials(a, G);
    }
  }
  if (args.columns > kLongestRow<S>) {
    launch_dx(a);
    return backward_parameters(a, device);
  }
  backward_layout<S>(args.columns, [&]<class L>(L) {
    const std::int64_t G = partial_rows<L>(args.rows);
    const Tensor partials = allocate_partials(a, G, device);
    launch_stage1<T, W, L>(a, G);
    add_partials(a, G);
  });
}

}  // namespace

template <class T, class W>
void add_partials(const Backward<T, W>& a, std::int64_t partial_rows) {
  using S = Accumulate<T>;
  if (a.dweight == nullptr && a.dbias == nullptr && a.dx_sum == nullptr) {
    return;
  }
  const int rows = a.dx_sum != nullptr ? 3 : 2;  // of results
  cuda::Launch(dim3(grid_of((a.columns + kWarp - 1) / kWarp), rows), kStage2Warps * kWarp)
      .dependent()
      .run(layer_norm_backward_sum_kernel<S, W, T>, "layer_norm_backward_sum_kernel",
           Stage2<S, W>{a.dweights, a.dweight}, Stage2<S, W>{a.dbiases, a.dbias}, Stage2<S, T>{a.dx_sums, a.dx_sum},
           partial_rows, a.columns);
}

#define MICA_INSTANTIATE(T, W) template void add_partials(const Backward<T, W>&, std::int64_t)
MICA_FOR_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace layer_norm_cuda

void layer_norm_backward(Cuda, const LayerNormBackward& args) {
  const Tensor& parameter = args.weight.defined()    ? args.weight
                            : args.dweight.defined() ? args.dweight
                            : args.dbias.defined()   ? args.dbias
                                                     : args.x;
  rows::on_row_types(args.x.dtype(), parameter.dtype(), "layer_norm",
                     [&]<class T, class W>() { layer_norm_cuda::launch_backward<T, W>(args); });
}

}  // namespace mica::kernels
