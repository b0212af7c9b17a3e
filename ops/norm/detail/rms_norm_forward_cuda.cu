#include <algorithm>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/detail/held_rows_cuda.cuh>
#include <mica/ops/norm/detail/rms_norm_kernels.h>

// T is the type of x and y, W that of weight, S that of sums: float, or double for double. V is the number of columns
// in a pack, P that of packs of a row that a thread holds.

namespace mica::kernels {

using namespace rows;

namespace {

// Results larger than this leave the L2 cache before anybody reads them. Then x is told to stay in it longest: what is
// written leaves in the order in which it came, which the memory takes faster.
constexpr std::size_t kLargeResult = std::size_t{40} << 20;  // bytes

template <class T, class W>
struct Forward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* x;
  const W* weight;  // null: 1
  S eps;
  S in_row;  // 1 / columns
  T* y;
  S* rstd;  // null: not wanted
  bool x_last_in_l2;
};

// Blocks that a multiprocessor has room for, at least: as many as possible such that nothing is spilled.
template <class T, int V, int P, Holder kHolder>
constexpr int kLeastBlocks = [] {
  constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row that a thread holds
  if (sizeof(T) == 8) {
    return 1;
  }
  if (V == 1) {
    return kHolder == Holder::block ? 1 : 3;
  }
  return kHolder == Holder::block ? 2 : kBytes <= 48 ? 6 : 4;
}();

// A row lies in its team's registers from the one time it is read until y is written. blockDim.x threads share a row,
// and blockDim.y rows a block.
template <class T, class W, int V, int P, Holder kHolder>
__global__ void __launch_bounds__(kMostHolderThreads<kHolder>, (kLeastBlocks<T, V, P, kHolder>))
    rms_norm_forward_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ S warps[kHolder == Holder::block ? kHolderThreads / kWarp : 1];
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (kHolder == Holder::warp && row >= a.rows) {
    return;  // fewer lanes stay, to take part in what warps do together
  }
  const bool present = kHolder != Holder::lanes || row < a.rows;
  const int columns = present ? static_cast<int>(a.columns) : 0;
  const std::int64_t begin = present ? row * a.columns : 0;
  const int first = threadIdx.x * V;
  const int step = blockDim.x * V;
  HeldPacks<T, V, P> packs;
  packs.load_from(a.x + begin, first, step, columns, a.x_last_in_l2 ? cuda::evict_last() : cuda::evict_normal());
  S squares = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    S x[V];
    packs.values(i, x);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      squares = fma(x[j], x[j], squares);
    }
  }
  const S rstd = rsqrt(over_threads<kSumLanes<kHolder>>(squares, warps) * a.in_row + a.eps);
  packs.forget();
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int column = first + i * step;
    if (column < columns) {
      S x[V];
      S w[V];
      packs.values(i, x);
      unpack(load_or<V>(a.weight, column, 1), w);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] *= rstd * w[j];
      }
      store(a.y + begin + column, pack_of<T>(x));
    }
  }
  if (a.rstd != nullptr && threadIdx.x == 0 && present) {
    a.rstd[row] = rstd;
  }
}

constexpr int kLoopedBlock = 1024;  // threads

// Packs that a thread of the loops below has under way.
template <int V>
constexpr int kUnroll = V == 8 ? 4 : 8;

// Rows of any length, each read twice by one block.
template <class T, class W, int V>
__global__ void __launch_bounds__(kLoopedBlock, 1) rms_norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  constexpr int U = kUnroll<V>;
  __shared__ S warps[kLoopedBlock / kWarp];
  const std::int64_t begin = std::int64_t{blockIdx.x} * a.columns;
  const auto for_packs = [&](auto f) {  // f(column, x)
#pragma unroll 1
    for (std::int64_t first = threadIdx.x * V; first < a.columns; first += U * kLoopedBlock * V) {
      Pack<T, V> packs[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t column = first + u * (kLoopedBlock * V);
        packs[u] = {};
        if (column < a.columns) {
          packs[u] = load<V>(a.x + begin + column);
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t column = first + u * (kLoopedBlock * V);
        if (column < a.columns) {
          S x[V];
          unpack(packs[u], x);
          f(column, x);
        }
      }
    }
  };
  S squares = 0;
  for_packs([&](std::int64_t, const S(&x)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      squares = fma(x[j], x[j], squares);
    }
  });
  const S rstd = rsqrt(over_threads<0>(squares, warps) * a.in_row + a.eps);
  for_packs([&](std::int64_t column, S(&x)[V]) {
    S w[V];
    unpack(load_or<V>(a.weight, column, 1), w);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x[j] *= rstd * w[j];
    }
    store(a.y + begin + column, pack_of<T>(x));
  });
  if (a.rstd != nullptr && threadIdx.x == 0) {
    a.rstd[blockIdx.x] = rstd;
  }
}

// On the host.

template <class T, class W, int V>
void launch_forward(const Forward<T, W>& a) {
  const cudaStream_t stream = cuda::current_stream();
  const bool held = with_holder<V>(a.columns, [&]<int P, Holder kHolder>(dim3 block) {
    rms_norm_forward_kernel<T, W, V, P, kHolder><<<grid_of((a.rows + block.y - 1) / block.y), block, 0, stream>>>(a);
    cuda::check_launch("rms_norm_forward_kernel");
  });
  if (!held) {
    rms_norm_forward_looped_kernel<T, W, V><<<grid_of(a.rows), kLoopedBlock, 0, stream>>>(a);
    cuda::check_launch("rms_norm_forward_looped_kernel");
  }
}

}  // namespace

void rms_norm_forward(Cuda, const NormForward& args) {
  const Tensor& parameter = args.weight.defined() ? args.weight : args.x;
  on_row_types(args.x.dtype(), parameter.dtype(), "rms_norm", [&]<class T, class W>() {
    using S = Accumulate<T>;
    const Forward<T, W> a{.rows = args.rows,
                          .columns = args.columns,
                          .x = args.x.data<T>(),
                          .weight = args.weight.data_or_null<W>(),
                          .eps = static_cast<S>(args.eps),
                          .in_row = S(1) / static_cast<S>(args.columns),
                          .y = args.y.data<T>(),
                          .rstd = args.rstd.data_or_null<S>(),
                          .x_last_in_l2 = args.y.bytes() > kLargeResult};
    with_pack_size<T>(
        a.columns, [&]<int V>(std::integral_constant<int, V>) { launch_forward<T, W, V>(a); }, a.x, a.weight, a.y);
  });
}

}  // namespace mica::kernels
