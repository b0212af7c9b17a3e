#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/layer_norm/layer_norm_kernels.h>
#include <mica/ops/layer_norm/rows_cuda.cuh>

// T is the type of x and y, W that of weight and bias, S that of sums: float, or double for double.

namespace mica::kernels {

using namespace rows;

namespace {

/// The choice of kernel by row length: f(layout, looped). Rows that fit in a layout's registers are read once.
template <class S, class F>
void forward_layout(std::int64_t columns, F&& f) {
  constexpr int kWide = 128 / sizeof(S);  // what a thread can hold of a row without spilling
  if (columns <= 64) {
    f(Layout<8, 128, 8>{}, std::false_type{});
  } else if (columns <= 256) {
    f(Layout<32, 128, 8>{}, std::false_type{});
  } else if (columns <= 32 * kWide) {
    f(Layout<32, 128, kWide>{}, std::false_type{});
  } else if (columns <= 4096) {
    f(Layout<256, 256, 16>{}, std::false_type{});
  } else if (columns <= 512 * kWide) {
    f(Layout<512, 512, kWide>{}, std::false_type{});
  } else {
    f(Layout<512, 512, 8>{}, std::true_type{});
  }
}

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

// Those of a row, from those of its threads.
template <class L, class S>
__device__ Moments<S> combine_row(const Moments<S>& mine, const Count<S>& in_warp, const Count<S>& in_row,
                                  Exchange<Moments<S>, L>& exchange) {
  if constexpr (L::kOneWarp) {
    return combine_lanes<L::kLanes>(mine, in_row);
  } else {
    const Moments<S> warp = combine_lanes<kWarp>(mine, in_warp);
    return combine_lanes<kWarp>(exchange.swap(warp, {0, 0, 0}), in_row);
  }
}

// How many columns of a row of `columns` are the thread's.
template <class L, int V, class S>
__device__ Count<S> count_share(std::int64_t columns) {
  int count = 0;
  for_packs<L, V>(columns, [&](int, int, bool inside) { count += inside ? V : 0; });
  return Count<S>(static_cast<S>(count));
}

// The thread's share of a row of `columns`: x · scale − shift, and its moments.
template <class L, int V, class T, class S>
__device__ Moments<S> shift_share(const Pack<T, V> (&packs)[L::kElements / V], std::int64_t columns,
                                  const Count<S>& count, S scale, S shift, S (&x)[L::kElements]) {
  S sum = 0;
  for_packs<L, V>(columns, [&](int i, int, bool inside) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x[i * V + j] = inside ? static_cast<S>(packs[i].at[j]) * scale - shift : S(0);
      sum += x[i * V + j];
    }
  });
  const S mean = sum * count.reciprocal;
  S m2 = 0;
  for_packs<L, V>(columns, [&](int i, int, bool inside) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const S difference = inside ? x[i * V + j] - mean : S(0);
      m2 += difference * difference;
    }
  });
  return {count.n, mean, m2};
}

template <class L, int V, class T, class W, class S>
__device__ void write_share(const Forward<T, W>& a, T* y_row, std::int64_t begin, std::int64_t columns,
                            const S (&x)[L::kElements], S mean, S rstd) {
  for_packs<L, V>(columns, [&](int i, int column, bool inside) {
    if (inside) {
      const Pack<W, V> weight = load_or<V>(a.weight, begin + column, 1);
      const Pack<W, V> bias = load_or<V>(a.bias, begin + column, 0);
      Pack<T, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const S x_hat = (x[i * V + j] - mean) * rstd;
        y.at[j] = static_cast<T>(x_hat * static_cast<S>(weight.at[j]) + static_cast<S>(bias.at[j]));
      }
      store(y_row + begin + column, y);
    }
  });
}

template <class T, class W, class S>
__device__ void write_statistics(const Forward<T, W>& a, std::int64_t row, S mean, S rstd, S scale) {
  if (a.mean != nullptr) {
    a.mean[row] = mean * (scale == 1 ? S(1) : S(1) / kShrink<S>);
    a.rstd[row] = rstd * scale;
  }
}

// Rows that fit in registers.
template <class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) layer_norm_forward_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Moments<S>, L>::Shared shared;
  Exchange<Moments<S>, L> exchange(shared);
  const Count<S> in_row(static_cast<S>(a.columns));
  const Count<S> in_share = count_share<L, V, S>(a.columns);
  const Count<S> in_warp(sum_lanes<kWarp>(in_share.n));
  const std::int64_t step = std::int64_t{gridDim.x} * L::kRows;
  for (std::int64_t first = std::int64_t{blockIdx.x} * L::kRows; first < a.rows; first += step) {
    const std::int64_t row = first + threadIdx.x / L::kThreads;
    const bool present = L::kRows == 1 || row < a.rows;  // else the thread only takes part in what warps do together
    const std::int64_t columns = present ? a.columns : 0;
    const T* const x_row = a.x + row * a.columns;

    S x[L::kElements];  // relative to the row's first element, so that a constant row is exactly 0
    S shift;
    Moments<S> m;
    S scale = 1;
#pragma unroll 1
    while (true) {
      Pack<T, V> packs[L::kElements / V];
      load_share<L, V>(x_row, columns, packs);
      shift = present ? static_cast<S>(x_row[0]) * scale : S(0);
      const Moments<S> mine = shift_share<L, V>(packs, columns, in_share, scale, shift, x);
      m = combine_row<L, S>(mine, in_warp, in_row, exchange);
      const bool overflow = scale == 1 && !isfinite(m.m2);
      if (!__any_sync(kAllLanes, overflow)) {
        break;
      }
      scale = overflow ? kShrink<S> : scale;
    }
    const S rstd = rsqrt(m.m2 * in_row.reciprocal + a.eps * scale * scale);
    write_share<L, V>(a, a.y + row * a.columns, 0, columns, x, m.mean, rstd);
    if (present && threadIdx.x % L::kThreads == 0) {
      write_statistics(a, row, shift + m.mean, rstd, scale);
    }
  }
}

// Rows of any length, each by one block that reads it twice, piece by piece.
template <class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) layer_norm_forward_looped_kernel(const Forward<T, W> a) {
  using S = Accumulate<T>;
  __shared__ typename Exchange<Moments<S>, L>::Shared shared;
  Exchange<Moments<S>, L> exchange(shared);
  const Count<S> in_row(static_cast<S>(a.columns));
  const Count<S> in_piece(L::kElements);
  const Count<S> in_last = count_share<L, V, S>((a.columns - 1) % L::kColumns + 1);
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* const x_row = a.x + row * a.columns;
    S shift;
    Moments<S> m;
    S scale = 1;
    const auto for_pieces = [&](auto f) {  // f(begin, columns, x, moments)
      for (std::int64_t begin = 0; begin < a.columns; begin += L::kColumns) {
        const std::int64_t columns = a.columns - begin;
        Pack<T, V> packs[L::kElements / V];
        load_share<L, V>(x_row + begin, columns, packs);
        S x[L::kElements];
        const Count<S> count = columns > L::kColumns ? in_piece : in_last;
        const Moments<S> piece = shift_share<L, V>(packs, columns, count, scale, shift, x);
        f(begin, columns, x, piece);
      }
    };
#pragma unroll 1
    while (true) {
      shift = static_cast<S>(x_row[0]) * scale;
      Moments<S> mine{0, 0, 0};
      for_pieces([&](std::int64_t, std::int64_t, const S(&)[L::kElements], const Moments<S>& piece) {
        if (piece.count > 0) {
          const S difference = piece.mean - mine.mean;
          const S share = piece.count / (mine.count + piece.count);
          mine.mean += difference * share;
          mine.m2 += piece.m2 + difference * difference * (mine.count * share);
          mine.count += piece.count;
        }
      });
      m = combine_row<L, S>(mine, Count<S>(sum_lanes<kWarp>(mine.count)), in_row, exchange);
      if (scale != 1 || isfinite(m.m2)) {
        break;
      }
      scale = kShrink<S>;
    }
    const S rstd = rsqrt(m.m2 * in_row.reciprocal + a.eps * scale * scale);
    for_pieces([&](std::int64_t begin, std::int64_t columns, const S(&x)[L::kElements], const Moments<S>&) {
      write_share<L, V>(a, a.y + row * a.columns, begin, columns, x, m.mean, rstd);
    });
    if (threadIdx.x == 0) {
      write_statistics(a, row, shift + m.mean, rstd, scale);
    }
  }
}

template <class T, class W>
void launch_forward(const LayerNormForward& args) {
  const Forward<T, W> a{.rows = args.rows,
                        .columns = args.columns,
                        .x = args.x.data<T>(),
                        .weight = data_or_null<W>(args.weight),
                        .bias = data_or_null<W>(args.bias),
                        .eps = static_cast<Accumulate<T>>(args.eps),
                        .y = args.y.data<T>(),
                        .mean = data_or_null<Accumulate<T>>(args.mean),
                        .rstd = data_or_null<Accumulate<T>>(args.rstd)};
  const auto launch = [&]<int V>(std::integral_constant<int, V>) {
    forward_layout<Accumulate<T>>(a.columns, [&]<class L, bool kLooped>(L, std::bool_constant<kLooped>) {
      const unsigned grid = grid_of((a.rows + L::kRows - 1) / L::kRows);
      if constexpr (kLooped) {
        layer_norm_forward_looped_kernel<T, W, L, V><<<grid, L::kBlock, 0, cuda::current_stream()>>>(a);
      } else {
        layer_norm_forward_kernel<T, W, L, V><<<grid, L::kBlock, 0, cuda::current_stream()>>>(a);
      }
    });
  };
  with_pack_size<T>(a.columns, launch, a.x, a.weight, a.bias, a.y);
  cuda::check_launch("layer_norm_forward_kernel");
}

}  // namespace

void layer_norm_forward(Cuda, const LayerNormForward& args) {
  const Tensor& parameter = args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x;
  on_row_types(args.x.dtype(), parameter.dtype(), "layer_norm",
               [&]<class T, class W>() { launch_forward<T, W>(args); });
}

}  // namespace mica::kernels
