#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/detail/held_rows_cuda.cuh>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/add_layer_norm_kernels.h>
#include <mica/ops/norm/detail/layer_norm_kernels.h>

// T is the type of x, residual, sum and y, W that of weight and bias. V is the number of columns in a pack of 16 bytes,
// P that of packs of a row that a thread holds.

namespace mica::kernels {

using namespace rows;

namespace {

constexpr int kBlock = 512;    // threads, at most
constexpr int kWarpTeams = 8;  // rows of a block, where a warp has each
constexpr int kMostPacks = 4;

// Results larger than this leave the L2 cache before anybody reads them. Then the inputs are told to stay in it
// longest: what is written leaves in the order in which it came, which the memory takes faster.
constexpr std::size_t kLargeResult = std::size_t{40} << 20;  // bytes

template <class T, class W>
struct Forward {
  std::int64_t rows;
  std::int64_t columns;
  const T* x;
  const T* residual;
  const W* weight;  // null: 1
  const W* bias;    // null: 0
  const T* x_bias;  // null: 0
  PhiloxKey key;
  std::uint32_t threshold;
  float scale;
  float eps;
  float in_row;  // 1 / columns
  T* sum;
  T* y;
  float* mean;  // null, with those that follow: not wanted
  float* mean_rest;
  float* rstd;
  bool inputs_last_in_l2;
};

// The first thread's `mine`.
template <bool kOneWarp>
__device__ float first_of_row(float mine) {
  if constexpr (kOneWarp) {
    return __shfl_sync(kAllLanes, mine, 0);
  } else {
    __shared__ float shared;
    if (threadIdx.x == 0) {
      shared = mine;
    }
    __syncthreads();
    return shared;
  }
}

// A row's sum lies in the registers of its threads, rounded as it is returned, until y is written. blockDim.x threads
// share a row, and blockDim.y rows a block.
template <class T, class W, int P, bool kOneWarp, bool kDrop>
__global__ void __launch_bounds__(kOneWarp ? kWarpTeams* kWarp : kBlock, kOneWarp ? 3 : 1)
    add_layer_norm_forward_kernel(const Forward<T, W> a) {
  constexpr int V = 16 / sizeof(T);
  constexpr int kLanes = kOneWarp ? kWarp : 0;
  __shared__ float warps[4][kOneWarp ? 1 : kBlock / kWarp];
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= a.rows) {
    return;  // a whole warp, of a row of its own
  }
  const std::int64_t begin = row * a.columns;
  const int columns = static_cast<int>(a.columns);
  const int first = threadIdx.x * V;
  const int step = blockDim.x * V;
  [[maybe_unused]] const PhiloxKey key = kDrop ? absolute_key(a.key) : PhiloxKey{};
  const std::uint64_t policy = a.inputs_last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
  Pack<T, V> sums[P];
  Pack<T, V> addends[P];
#pragma unroll
  for (int i = 0; i < P; ++i) {
    sums[i] = {};
    addends[i] = {};
    const int column = first + i * step;
    if (column < columns) {
      sums[i] = load_streaming<V>(a.residual + begin + column, policy);
      addends[i] = load_streaming<V>(a.x + begin + column, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int column = first + i * step;
    if (column < columns) {
      float s[V];
      float x[V];
      unpack(sums[i], s);
      unpack(addends[i], x);
      if (a.x_bias != nullptr) {
        float b[V];
        unpack(load<V>(a.x_bias + column), b);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          x[j] += b[j];
        }
      }
      if constexpr (kDrop) {
        drop_pack(x, begin + column, key, a.threshold, a.scale);
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        s[j] += x[j];
      }
      sums[i] = pack_of<T>(s);
      store(a.sum + begin + column, sums[i]);
    }
  }
  const float shift = first_of_row<kOneWarp>(static_cast<float>(sums[0].at[0]));
  float scale = 1;
  // f(column, scaled differences from the shift) for each pack.
  const auto for_packs = [&](auto f) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const int column = first + i * step;
      if (column < columns) {
        float s[V];
        unpack(sums[i], s);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          s[j] = fma(s[j], scale, -shift * scale);
        }
        f(column, s);
      }
    }
  };
  float mean;
  float squares;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    float mine = 0;
    for_packs([&](int, const float(&s)[V]) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        mine += s[j];
      }
    });
    mean = over_threads<kLanes>(mine, warps[2 * turn]) * a.in_row;
    mine = 0;
    for_packs([&](int, const float(&s)[V]) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        mine = fma(s[j] - mean, s[j] - mean, mine);
      }
    });
    squares = over_threads<kLanes>(mine, warps[2 * turn + 1]);
    if (turn == 1 || isfinite(squares)) {
      break;
    }
    scale = kShrink<float>;  // squares that overflow: the row is done again
  }
  const float rstd = rsqrt(squares * a.in_row + a.eps * scale * scale);
  for_packs([&](int column, float(&s)[V]) {
    float w[V];
    float b[V];
    unpack(load_or<V>(a.weight, column, 1), w);
    unpack(load_or<V>(a.bias, column, 0), b);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      s[j] = fma((s[j] - mean) * rstd, w[j], b[j]);
    }
    store(a.y + begin + column, pack_of<T>(s));
  });
  if (a.mean != nullptr && threadIdx.x == 0) {
    a.mean[row] = shift + mean / scale;
    a.rstd[row] = rstd * scale;
    if constexpr (has_mean_rest(sizeof(T))) {
      a.mean_rest[row] = mean_rounding(shift, mean / scale) * (rstd * scale);
    }
  }
}

// On the host.

template <class T, class W, bool kOneWarp, bool kDrop>
void launch(const Forward<T, W>& a, dim3 block, int packs) {
  const auto run = [&]<int P>() {
    add_layer_norm_forward_kernel<T, W, P, kOneWarp, kDrop>
        <<<grid_of((a.rows + block.y - 1) / block.y), block, 0, cuda::current_stream()>>>(a);
    cuda::check_launch("add_layer_norm_forward_kernel");
  };
  switch (packs) {
    case 1: return run.template operator()<1>();
    case 2: return run.template operator()<2>();
    case 3: return run.template operator()<3>();
    default: return run.template operator()<4>();
  }
}

template <class T, class W, bool kDrop>
void launch_forward(const Forward<T, W>& a) {
  constexpr int V = 16 / sizeof(T);
  const int in_warp = packs_of<V>(a.columns, kWarp);
  if (in_warp <= kMostPacks) {
    launch<T, W, true, kDrop>(a, dim3(kWarp, kWarpTeams), in_warp);
  } else {
    const int threads = block_threads<V>(a.columns, kMostPacks, kMostPacks - 1, kBlock);
    launch<T, W, false, kDrop>(a, threads, packs_of<V>(a.columns, threads));
  }
}

template <class T, class W>
bool forward(const NormForward& args) {
  constexpr int V = 16 / sizeof(T);
  const Forward<T, W> a{.rows = args.rows,
                        .columns = args.columns,
                        .x = args.x.data<T>(),
                        .residual = args.residual.data<T>(),
                        .weight = args.weight.data_or_null<W>(),
                        .bias = args.bias.data_or_null<W>(),
                        .x_bias = args.x_bias.data_or_null<T>(),
                        .key = args.dropout.key,
                        .threshold = args.dropout.threshold,
                        .scale = static_cast<float>(args.dropout.scale()),
                        .eps = static_cast<float>(args.eps),
                        .in_row = 1.0f / static_cast<float>(args.columns),
                        .sum = args.sum.data<T>(),
                        .y = args.y.data<T>(),
                        .mean = args.mean.data_or_null<float>(),
                        .mean_rest = mean_rest_of<float>(args.mean),
                        .rstd = args.rstd.data_or_null<float>(),
                        .inputs_last_in_l2 = 2 * args.y.bytes() > kLargeResult};
  bool fits = args.columns <= std::int64_t{kBlock} * V * kMostPacks;
  with_pack_size<T>(
      a.columns, [&]<int kPack>(std::integral_constant<int, kPack>) { fits = fits && kPack == V; }, a.x, a.residual,
      a.weight, a.bias, a.x_bias, a.sum, a.y);
  if (fits) {
    args.dropout.drops() ? launch_forward<T, W, true>(a) : launch_forward<T, W, false>(a);
  }
  return fits;
}

}  // namespace

bool add_norm_forward(Cuda, const NormForward& args) {
  if (!args.centered) {
    return false;
  }
  const Tensor& parameter = args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x;
  bool done = false;
  on_row_types(args.x.dtype(), parameter.dtype(), "add_layer_norm", [&]<class T, class W>() {
    if constexpr (sizeof(T) <= sizeof(float)) {
      done = forward<T, W>(args);
    }
  });
  return done;
}

}  // namespace mica::kernels
