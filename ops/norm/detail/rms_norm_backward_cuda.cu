#include <algorithm>

#include <mica/core/copy.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/norm/detail/layer_norm_backward_cuda.cuh>
#include <mica/ops/norm/detail/rms_norm_kernels.h>
#include <mica/ops/norm/detail/stream_norm_cuda.cuh>

// T is the type of x, dy and dx, W that of weight, S that of sums: float, or double for double.
// Stage 1 writes dx and G rows of partial dweight, stage 2, layer_norm's, adds those up. There are two kernels for
// stage 1: rows that stream through shared memory, and others that fit in registers; which rows a block takes is fixed.
// Longer rows have a kernel for dx, and layer_norm's for dweight.

namespace mica::kernels {

using namespace rows;

namespace {

/// mean, dbias and dbiases are null: there are none here.
template <class T, class W>
using Backward = layer_norm_cuda::Backward<T, W>;

constexpr int kMostThreads = 512;  // of a block that streams

constexpr int kDepth = 2;  // rows in shared memory, one of them in use

// Rows stream: while one is worked on, the next is on its way into shared memory. A thread copies what it will use
// itself, and keeps the sums over its columns in registers for all of its rows. x̂ and g = dy · weight stay in registers
// from the sum over a row to dx where there is room, else they come from shared memory again.
template <class T, class W, int V, int P>
__global__ void __launch_bounds__(kMostThreads, 1)
    rms_norm_backward_stream_kernel(const Backward<T, W> a, const StreamPlan p) {
  constexpr bool kKeep = P * V <= 16;
  extern __shared__ __align__(128) unsigned char memory[];
  const StreamPlace<Team::block> at(p, a.columns, V, P);
  Meeting<Team::block> meeting(p, 0, memory);
  Stream<T, V, 2, P, kDepth> stream(p, memory);
  const std::int64_t row_step = at.step * a.columns;
  std::int64_t ahead_row = at.first;
  std::int64_t ahead = at.first * a.columns + at.first_pack * V;
  const auto fetch = [&](int place) {  // the next row that is not yet on its way
    if (ahead_row < a.rows) {
      stream.fetch(place, at.packs, a.x + ahead, a.dy + ahead);
    }
    cuda::commit_copies();  // also of nothing: they are counted
    ahead_row += at.step;
    ahead += row_step;
  };
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    fetch(i);
  }
  RowNumbers rstds(a.rstd, a.rows, at.first, at.step);
  const Weights<W, V, P, kKeep> weights(a.weight, p, at, memory);
  float dweight[P * V] = {};
  const float in_row = 1.0f / static_cast<float>(a.columns);
  meeting.open();
  cuda::allow_dependents();

  float x_hat[kKeep ? P * V : V];
  float g[kKeep ? P * V : V];
  // x̂, g and dy of pack i of the row at `place`.
  const auto look = [&](int place, int i, float rstd, float(&dy)[V]) {
    float x[V];
    float w[V];
    unpack(stream.at(place, 0, i), x);
    unpack(stream.at(place, 1, i), dy);
    weights.at(i, w);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x_hat[(kKeep ? i * V : 0) + j] = x[j] * rstd;
      g[(kKeep ? i * V : 0) + j] = dy[j] * w[j];
    }
  };
  T* dx = a.dx == nullptr ? nullptr : a.dx + at.first * a.columns + at.first_pack * V;
  int place = 0;
#pragma unroll 1
  for (std::int64_t row = at.first; row < a.rows; row += at.step) {
    const float rstd = rstds.take();
    cuda::wait_copies<kDepth - 1>();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      // Absent packs are zeros, but many packs without branches between them would fill the registers.
      if (kKeep || i < at.packs) {
        float dy[V];
        look(place, i, rstd, dy);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = (kKeep ? i * V : 0) + j;
          sum = fma(g[k], x_hat[k], sum);
          dweight[i * V + j] = fma(dy[j], x_hat[k], dweight[i * V + j]);
        }
      }
    }
    if constexpr (kKeep) {
      fetch(place);
    }
    meeting.leave(sum_lanes<kWarp>(sum), [](const float*, int) { return 0.0f; });
    const float* const sums = meeting.take();
    const int lane = threadIdx.x % kWarp;
    const float total = sum_lanes<kWarp>(lane < meeting.members() ? sums[lane] : 0.0f);
    const float slope = -total * in_row * rstd;  // dx = g · rstd + x̂ · slope
    if (dx != nullptr) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (i < at.packs) {
          float values[V];
          if constexpr (!kKeep) {
            look(place, i, rstd, values);
          }
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int k = (kKeep ? i * V : 0) + j;
            values[j] = fma(g[k], rstd, x_hat[k] * slope);
          }
          store(dx + i * (kWarp * V), pack_of<T>(values));
        }
      }
      dx += row_step;
    }
    if constexpr (!kKeep) {
      fetch(place);
    }
    place = stream.next(place);
  }

  cuda::wait_copies<0>();
  if (a.dweights != nullptr) {
    __syncthreads();  // the memory is free
    write_partials<V, P>(dweight, a.dweights + blockIdx.x * a.columns, p, at,
                         reinterpret_cast<float*>(memory + p.stream_begin()));
  }
}

// The sum over a row, from those of its threads.
template <class L, class S>
__device__ S sum_row(S mine, Exchange<S, L>& exchange) {
  const S warp = sum_lanes<L::kLanes>(mine);
  if constexpr (L::kOneWarp) {
    return warp;
  } else {
    return sum_lanes<kWarp>(exchange.swap(warp, 0));
  }
}

// Writes the block's row of partials: the sum of its threads' over the rows they work on at once. `shared` has room for
// one row of each warp, where a warp has several rows.
template <class L, int V, class S>
__device__ void write_partials(S (&dweight)[L::kElements], S* partial, std::int64_t columns, S* shared) {
  if constexpr (L::kRows > 1) {
#pragma unroll
    for (S& sum : dweight) {
#pragma unroll
      for (int step = L::kThreads; step < kWarp; step *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, step);
      }
    }
  }
  S* const own = L::kRows > 1 ? shared + threadIdx.x / kWarp * L::kColumns : partial;
  if (L::kRows == 1 || threadIdx.x % kWarp < L::kThreads) {
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
      if (inside) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          own[column + j] = dweight[i * V + j];
        }
      }
    });
  }
  if constexpr (L::kRows > 1) {
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

// Rows that fit in the registers of their threads.
template <class T, class W, class L, int V>
__global__ void __launch_bounds__(L::kBlock, 1) rms_norm_backward_kernel(const Backward<T, W> a) {
  using S = Accumulate<T>;
  constexpr int kPacks = L::kElements / V;
  __shared__ typename Exchange<S, L>::Shared shared;
  __shared__ S fold[L::kRows > 1 ? L::kWarps * L::kColumns : 1];
  Exchange<S, L> exchange(shared);
  S dweight[L::kElements] = {};
  const std::int64_t step = std::int64_t{gridDim.x} * L::kRows;
  for (std::int64_t first = std::int64_t{blockIdx.x} * L::kRows; first < a.rows; first += step) {
    const std::int64_t row = first + threadIdx.x / L::kThreads;
    const bool present = L::kRows == 1 || row < a.rows;  // else the thread only takes part in what warps do together
    const std::int64_t columns = present ? a.columns : 0;
    const std::int64_t begin = row * a.columns;
    const S rstd = present ? a.rstd[row] : S(0);
    Pack<T, V> dys[kPacks];
    Pack<T, V> xs[kPacks];
    load_share<L, V>(a.dy + begin, columns, dys);
    load_share<L, V>(a.x + begin, columns, xs);
    S g[L::kElements];
    S x_hat[L::kElements];
    S sum = 0;
    for_packs<L, V>(columns, [&](int i, int column, bool inside) {
      Pack<W, V> weights = {};
      if (inside) {
        weights = load_or<V>(a.weight, column, 1);
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int k = i * V + j;
        const S dy = static_cast<S>(dys[i].at[j]);
        x_hat[k] = static_cast<S>(xs[i].at[j]) * rstd;
        g[k] = dy * static_cast<S>(weights.at[j]);
        sum += g[k] * x_hat[k];
        dweight[k] += dy * x_hat[k];
      }
    });
    const S mean = sum_row<L>(sum, exchange) / static_cast<S>(a.columns);
    if (a.dx != nullptr) {
      for_packs<L, V>(columns, [&](int i, int column, bool inside) {
        if (inside) {
          S values[V];
#pragma unroll
          for (int j = 0; j < V; ++j) {
            values[j] = (g[i * V + j] - x_hat[i * V + j] * mean) * rstd;
          }
          store(a.dx + begin + column, pack_of<T>(values));
        }
      });
    }
  }
  if (a.dweights != nullptr) {
    write_partials<L, V>(dweight, a.dweights + blockIdx.x * a.columns, a.columns, fold);
  }
}

// dx alone, for rows of any length, each read twice by one block.
template <class T, class W, int V>
__global__ void __launch_bounds__(1024, 1) rms_norm_backward_dx_kernel(const Backward<T, W> a) {
  using S = Accumulate<T>;
  using L = Layout<1024, 1024, V>;
  constexpr int U = V == 8 ? 2 : V == 1 ? 8 : 4;  // packs of each that a thread has under way
  __shared__ typename Exchange<S, L>::Shared shared;
  Exchange<S, L> exchange(shared);
  const std::int64_t begin = std::int64_t{blockIdx.x} * a.columns;
  const S rstd = a.rstd[blockIdx.x];
  const auto for_packs = [&](auto f) {  // f(column, x̂, g)
#pragma unroll 1
    for (std::int64_t first = threadIdx.x * V; first < a.columns; first += U * L::kColumns) {
      Pack<T, V> dys[U];
      Pack<T, V> xs[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t column = first + u * L::kColumns;
        dys[u] = {};
        xs[u] = {};
        if (column < a.columns) {
          dys[u] = load<V>(a.dy + begin + column);
          xs[u] = load<V>(a.x + begin + column);
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t column = first + u * L::kColumns;
        if (column < a.columns) {
          S dy[V];
          S x_hat[V];
          S g[V];
          unpack(dys[u], dy);
          unpack(xs[u], x_hat);
          unpack(load_or<V>(a.weight, column, 1), g);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            x_hat[j] *= rstd;
            g[j] *= dy[j];
          }
          f(column, x_hat, g);
        }
      }
    }
  };
  S sum = 0;
  for_packs([&](std::int64_t, const S(&x_hat)[V], const S(&g)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sum += g[j] * x_hat[j];
    }
  });
  const S mean = sum_row<L>(sum, exchange) / static_cast<S>(a.columns);
  for_packs([&](std::int64_t column, const S(&x_hat)[V], S(&g)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      g[j] = (g[j] - x_hat[j] * mean) * rstd;
    }
    store(a.dx + begin + column, pack_of<T>(g));
  });
}

// On the host. G, the rows of partials, is a function of the shape and of the kernel alone.

/// Packs a thread for rows that stream, of a length that can be read in packs of V; 0: they do not.
template <int V>
int stream_packs(std::int64_t columns) {
  if (columns <= 256) {
    return 0;
  }
  if (V == 8) {
    const int least = columns <= 1536 ? 1 : columns <= 8192 ? 2 : columns <= 12288 ? 3 : 4;
    return columns <= 16384 ? least : 0;
  }
  return columns > 8192 ? 0 : V == 1 ? 16 : columns <= 1024 ? 2 : 4;
}

template <class T, class W, int V>
StreamPlan stream_plan(std::int64_t columns, int packs) {
  StreamPlan p{.packs = packs};
  divide(p, columns, V, kMostThreads);
  p.kept_bytes = packs * V <= 16 ? 0 : p.threads * packs * V * static_cast<int>(sizeof(W));
  const int fold_bytes = p.groups > 1 ? p.groups * p.slab * static_cast<int>(sizeof(float)) : 0;
  p.stream_bytes = std::max(fold_bytes, kDepth * p.block() * packs * 2 * V * static_cast<int>(sizeof(T)));
  return p;
}

template <class T, class W, int V>
bool stream_rows(Backward<T, W> a, Device device) {
  const int packs = stream_packs<V>(a.columns);
  if (packs == 0 || !cuda::device_has_clusters()) {
    return false;
  }
  const StreamPlan p = stream_plan<T, W, V>(a.columns, packs);
  const std::int64_t G = stream_teams(p, a.rows);
  const Tensor partials = allocate_partials(a, G, device);
  const auto launch = [&]<int P>() {
    launch_stream(rms_norm_backward_stream_kernel<T, W, V, P>, "rms_norm_backward_stream_kernel", p, a.rows, a);
  };
  if constexpr (V == 1) {
    launch.template operator()<16>();
  } else if constexpr (V == 4) {
    packs == 2 ? launch.template operator()<2>() : launch.template operator()<4>();
  } else {
    switch (packs) {
      case 1: launch.template operator()<1>(); break;
      case 2: launch.template operator()<2>(); break;
      case 3: launch.template operator()<3>(); break;
      default: launch.template operator()<4>();
    }
  }
  layer_norm_cuda::add_partials(a, G);
  return true;
}

template <class S>
constexpr int kWide = 64 / sizeof(S);  // what a thread can hold of a row, and of its sums, without spilling

/// The choice by row length, for rows that fit in registers: f(layout).
template <class S, int V, class F>
void with_layout(std::int64_t columns, F&& f) {
  if (columns <= 64) {
    f(Layout<8, 256, 8>{});
  } else if (V > 1 && columns <= 128) {
    f(Layout<128 / kWide<S>, 256, kWide<S>>{});
  } else if (V > 1 && columns <= 256) {
    f(Layout<256 / kWide<S>, 256, kWide<S>>{});
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

template <class T, class W, int V>
void rows_in_registers(Backward<T, W> a, Device device) {
  with_layout<Accumulate<T>, V>(a.columns, [&]<class L>(L) {
    // As many blocks as an H200 has room for at a time, or about so many.
    constexpr std::int64_t kMost = L::kRows == 1 ? 65536 / L::kBlock : L::kElements == 16 ? 3 * kStreamBlocks : 512;
    const std::int64_t G = std::min<std::int64_t>((a.rows + L::kRows - 1) / L::kRows, kMost);
    const Tensor partials = allocate_partials(a, G, device);
    rms_norm_backward_kernel<T, W, L, V><<<grid_of(G), L::kBlock, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("rms_norm_backward_kernel");
    layer_norm_cuda::add_partials(a, G);
  });
}

// dx, and then dweight by layer_norm's kernel for parameters alone, for which all means are 0.
template <class T, class W, int V>
void long_rows(Backward<T, W> a, Device device) {
  using S = Accumulate<T>;
  if (a.dx != nullptr) {
    rms_norm_backward_dx_kernel<T, W, V><<<grid_of(a.rows), 1024, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("rms_norm_backward_dx_kernel");
  }
  if (a.dweight != nullptr) {
    const Tensor mean = empty({a.rows}, dtype_of<S>, device);
    fill_data(mean, 0);
    a.mean = mean.data<S>();
    a.mean_rest = mean.data<S>();
    layer_norm_cuda::backward_parameters(a, device);
  }
}

template <class T, class W>
void launch_backward(const Backward<T, W>& a, Device device) {
  using S = Accumulate<T>;
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        if constexpr (std::is_same_v<S, float> && (V > 1 || sizeof(T) == 4)) {
          if (stream_rows<T, W, V>(a, device)) {
            return;
          }
        }
        if (a.columns <= 512 * kWide<S>) {
          rows_in_registers<T, W, V>(a, device);
        } else {
          long_rows<T, W, V>(a, device);
        }
      },
      a.dy, a.x, a.weight, a.dx);
}

}  // namespace

void rms_norm_backward(Cuda, const RMSNormBackward& args) {
  const Tensor& parameter = args.weight.defined() ? args.weight : args.dweight.defined() ? args.dweight : args.x;
  on_row_types(args.x.dtype(), parameter.dtype(), "rms_norm", [&]<class T, class W>() {
    using S = Accumulate<T>;
    const Backward<T, W> a{.rows = args.rows,
                           .columns = args.columns,
                           .dy = args.dy.data<T>(),
                           .x = args.x.data<T>(),
                           .weight = args.weight.data_or_null<W>(),
                           .mean = nullptr,
                           .mean_rest = nullptr,
                           .rstd = args.rstd.data<S>(),
                           .dx = args.dx.data_or_null<T>(),
                           .dweight = args.dweight.data_or_null<W>(),
                           .dbias = nullptr};
    launch_backward(a, args.x.device());
  });
}

}  // namespace mica::kernels
