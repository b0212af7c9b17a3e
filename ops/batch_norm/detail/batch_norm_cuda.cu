#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/elementwise.cuh>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/ops/batch_norm/detail/batch_norm_kernels.h>
#include <mica/ops/rows/detail/rows_cuda.cuh>

// A unit is a pack of V adjacent elements, or one element: of V channels if channels are innermost, else of one. The
// units of a channel are divided into tiles of U units per thread, and a block takes every parts-th tile of its
// channels:
//
//     x, dy ──▶ a thread's sums ──shuffles──▶ a warp's ──shared memory──▶ a block's, which is one part of the batch
//
// The statistics are two passes: over x for parts of the batch, then over the parts. The passes that write x-like
// tensors go through the tiles backwards, since the last ones that the pass before them has read are still in the L2
// cache.

namespace mica::kernels {

namespace batch_norm_cuda {

using rows::fit_packs;
using rows::grid_of;
using rows::kAllLanes;
using rows::kWarp;
using rows::load;
using rows::load_streaming;
using rows::Pack;
using rows::pack_of;
using rows::store_whole;
using rows::unpack;
using rows::with_pack;

constexpr int kThreads = 256;
constexpr int kBlockWarps = kThreads / kWarp;
constexpr int kSumBlocks = 528;     // for which the batch is divided: 4 for each multiprocessor of an H100
constexpr int kWriteBlocks = 1056;  // at least, of a kernel that writes images, if they have as many tiles
constexpr int kWrittenTiles = 8;    // of a block, at most, so that the channels' coefficients are read seldom

/// Where a thread's units are.
template <int V, bool kRowOfChannels>
struct Units {
  std::int64_t channels = 0;
  std::int64_t inner = 1;
  std::int64_t count = 0;   // units of a channel
  cuda::Divisor in_run{1};  // units of a run, unless channels are innermost
  int lanes_x = 1;          // threads that share a run of channels; the others of the block have other units
  int parts = 1;

  static constexpr int kChannels = kRowOfChannels ? V : 1;  // of a unit

  __device__ int lane() const { return static_cast<int>(threadIdx.x) / lanes_x; }
  __device__ int lanes() const { return kThreads / lanes_x; }
  __device__ std::int64_t channel() const {
    return kRowOfChannels ? (std::int64_t{blockIdx.x} * lanes_x + threadIdx.x % lanes_x) * V : blockIdx.x;
  }
  /// The offset of unit `unit` of the thread's channels, in elements.
  __device__ std::int64_t offset(std::int64_t unit, std::int64_t channel) const {
    if constexpr (kRowOfChannels) {
      return unit * channels + channel;
    } else {
      const auto index = static_cast<std::uint32_t>(unit);
      const std::uint32_t o = in_run.quotient(index);
      return (o * channels + channel) * inner + static_cast<std::int64_t>(index - o * in_run.divisor) * V;
    }
  }
  /// Calls use(unit of the thread's first, step between its U units) for the block's tiles.
  template <int U, bool kBackwards, class F>
  __device__ void for_tiles(const F& use) const {
    const std::int64_t tile = std::int64_t{lanes()} * U;
    const std::int64_t tiles = (count + tile - 1) / tile;
    for (std::int64_t t = blockIdx.y; t < tiles; t += parts) {
      use((kBackwards ? tiles - 1 - t : t) * tile + lane());
    }
  }
  /// The number of units of the block's tiles.
  template <int U>
  __device__ std::int64_t in_block() const {
    const std::int64_t tile = std::int64_t{lanes()} * U;
    const std::int64_t tiles = (count + tile - 1) / tile;
    const std::int64_t mine = (tiles - blockIdx.y + parts - 1) / parts;
    const bool has_last = (tiles - 1) % parts == blockIdx.y;
    return mine * tile - (has_last ? tiles * tile - count : 0);
  }
};

/// A parameter of a channel, of T or of S.
template <class T, class S>
struct ChannelParameter {
  const void* data = nullptr;
  bool narrow = false;

  ChannelParameter(const Tensor& x)
      : data(x.defined() ? x.raw_data() : nullptr), narrow(x.defined() && x.dtype() != dtype_of<S>) {}

  __device__ S at(std::int64_t channel, S absent) const {
    if (data == nullptr) {
      return absent;
    }
    return narrow ? static_cast<S>(static_cast<const T*>(data)[channel]) : static_cast<const S*>(data)[channel];
  }
};

/// y = (x − mean) · scale + shift for the kChannels channels of a thread's units.
template <class S, int kChannels>
struct ChannelCoefficients {
  S mean[kChannels];
  S rstd[kChannels];
  S scale[kChannels];
  S shift[kChannels];

  template <class T>
  __device__ ChannelCoefficients(const S* statistics, const ChannelParameter<T, S>& weight,
                                 const ChannelParameter<T, S>& bias, std::int64_t channels, std::int64_t channel) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      mean[k] = statistics[channel + k];
      rstd[k] = statistics[channels + channel + k];
      scale[k] = rstd[k] * weight.at(channel + k, S(1));
      shift[k] = bias.at(channel + k, S(0));
    }
  }
};

template <class S, int kMostChannels>
struct BlockSums {
  S at[2][kBlockWarps][kMostChannels];
};

/// Adds up two sums of each of a thread's channels over the lanes of the block, and calls use(channel of the block,
/// sum, other sum) for each channel of the block.
template <int kChannels, class S, class F>
__device__ void over_block(BlockSums<S, kWarp * kChannels>& shared, int lanes_x, S (&first)[kChannels],
                           S (&second)[kChannels], const F& use) {
  for (int step = kWarp / 2; step >= lanes_x; step /= 2) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      first[k] += __shfl_xor_sync(kAllLanes, first[k], step);
      second[k] += __shfl_xor_sync(kAllLanes, second[k], step);
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane < lanes_x) {
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      shared.at[0][warp][lane * kChannels + k] = first[k];
      shared.at[1][warp][lane * kChannels + k] = second[k];
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < lanes_x * kChannels; c += kThreads) {
    S sum = 0;
    S other = 0;
#pragma unroll
    for (int w = 0; w < kBlockWarps; ++w) {
      sum += shared.at[0][w][c];
      other += shared.at[1][w][c];
    }
    use(c, sum, other);
  }
}

/// The number of units that a thread loads before it uses the first.
template <class T, int V>
constexpr int kUnroll = sizeof(T) == 8 ? 2 : 4;

template <class T, int V, bool kRowOfChannels>
__global__ void __launch_bounds__(kThreads, 4)
    batch_moments_kernel(Units<V, kRowOfChannels> units, const T* x, Accumulate<T>* parts, std::int64_t* batches) {
  using S = Accumulate<T>;
  constexpr int C = kRowOfChannels ? V : 1;
  constexpr int U = kUnroll<T, V>;
  __shared__ BlockSums<S, kWarp * C> shared;
  if (batches != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    ++*batches;
  }
  const std::int64_t channel = units.channel();
  const bool inside = channel < units.channels;
  // Sums of x − shift, where the shift is the first of the block's units, lose no digits if the mean is large.
  S shift[C] = {};
  S first[C] = {};
  S second[C] = {};
  if (inside) {
    S values[V];
    unpack(load<V>(x + units.offset(std::int64_t{blockIdx.y} * units.lanes() * U, channel)), values);
#pragma unroll
    for (int k = 0; k < C; ++k) {
      shift[k] = values[k];
    }
    units.template for_tiles<U, false>([&](std::int64_t unit) {
      Pack<T, V> packs[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t at = unit + u * units.lanes();
        if (at < units.count) {
          packs[u] = load_streaming<V>(x + units.offset(at, channel));
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (unit + u * units.lanes() < units.count) {
          unpack(packs[u], values);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            constexpr int kStep = kRowOfChannels ? 1 : 0;
            const S d = values[j] - shift[j * kStep];
            first[j * kStep] += d;
            second[j * kStep] += d * d;
          }
        }
      }
    });
  }
  const S count = static_cast<S>(units.template in_block<U>() * (V / C));
  over_block<C>(shared, units.lanes_x, first, second, [&](int c, S sum, S squares) {
    const std::int64_t to = kRowOfChannels ? std::int64_t{blockIdx.x} * units.lanes_x * V + c : channel;
    if (to < units.channels) {
      S* const part = parts + blockIdx.y * 3 * units.channels + to;
      const std::int64_t shift_at = std::int64_t{blockIdx.y} * units.lanes() * U;
      const S mean = sum / count;
      part[0] = count;
      part[units.channels] = static_cast<S>(x[units.offset(shift_at, to)]) + mean;
      const S rest = squares - sum * mean;
      part[2 * units.channels] = rest < S(0) ? S(0) : rest;  // keeps NaN
    }
  });
}

constexpr int kMergeLanes = 16;  // threads that share a channel

/// Combines the moments of parts, in two passes: the mean, then Σ (x − mean)² = Σ rest + count · (part's mean − mean)².
template <class S, class R>
__global__ void __launch_bounds__(kWarp* kMergeLanes)
    batch_statistics_kernel(const S* parts, int count, std::int64_t channels, S* merged, S* statistics, R* running_mean,
                            R* running_var, const std::int64_t* batches, double momentum, double eps) {
  __shared__ double shared[3][kMergeLanes][kWarp];
  const std::int64_t channel = std::int64_t{blockIdx.x} * kWarp + threadIdx.x;
  const bool inside = channel < channels;
  const int lane = static_cast<int>(threadIdx.y);
  const auto over_lanes = [&](int k, double mine) {
    shared[k][lane][threadIdx.x] = mine;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kMergeLanes; ++i) {
      sum += shared[k][i][threadIdx.x];
    }
    return sum;
  };
  const auto read = [&](int part, int k) {
    return static_cast<double>(parts[(static_cast<std::int64_t>(part) * 3 + k) * channels + channel]);
  };
  double elements = 0;
  double weighted = 0;
  if (inside) {
#pragma unroll 4
    for (int p = lane; p < count; p += kMergeLanes) {
      elements += read(p, 0);
      weighted += read(p, 0) * read(p, 1);
    }
  }
  elements = over_lanes(0, elements);
  const double mean = over_lanes(1, weighted) / elements;
  double rest = 0;
  if (inside) {
#pragma unroll 4
    for (int p = lane; p < count; p += kMergeLanes) {
      const double distance = read(p, 1) - mean;
      rest += read(p, 2) + read(p, 0) * distance * distance;
    }
  }
  rest = over_lanes(2, rest);
  if (!inside || lane != 0) {
    return;
  }
  if (merged != nullptr) {
    merged[channel] = static_cast<S>(elements);
    merged[channels + channel] = static_cast<S>(mean);
    merged[2 * channels + channel] = static_cast<S>(rest);
    return;
  }
  statistics[channel] = static_cast<S>(mean);
  statistics[channels + channel] = static_cast<S>(1 / sqrt(rest / elements + eps));
  if (running_mean != nullptr) {
    const double m = batches != nullptr ? 1 / static_cast<double>(*batches) : momentum;
    const auto moved = [&](R& estimate, double value) {
      estimate = static_cast<R>(static_cast<S>((1 - m) * static_cast<double>(static_cast<S>(estimate)) + m * value));
    };
    moved(running_mean[channel], mean);
    moved(running_var[channel], rest / (elements - 1));
  }
}

/// The statistics in evaluation.
template <class S, class R>
__global__ void __launch_bounds__(kThreads)
    batch_estimates_kernel(std::int64_t channels, S* statistics, const R* running_mean, const R* running_var, S eps) {
  const std::int64_t channel = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel < channels) {
    statistics[channel] = static_cast<S>(running_mean[channel]);
    statistics[channels + channel] = S(1) / sqrt(static_cast<S>(running_var[channel]) + eps);
  }
}

template <class T, int V, bool kRowOfChannels>
__global__ void __launch_bounds__(kThreads, 3)
    batch_norm_forward_kernel(Units<V, kRowOfChannels> units, const T* x, const T* residual,
                              ChannelParameter<T, Accumulate<T>> weight, ChannelParameter<T, Accumulate<T>> bias,
                              const Accumulate<T>* statistics, T* y, bool relu) {
  using S = Accumulate<T>;
  constexpr int C = kRowOfChannels ? V : 1;
  constexpr int U = 3;  // registers for 4 would spill
  const std::int64_t channel = units.channel();
  if (channel >= units.channels) {
    return;
  }
  const ChannelCoefficients<S, C> c(statistics, weight, bias, units.channels, channel);
  units.template for_tiles<U, true>([&](std::int64_t unit) {
    Pack<T, V> packs[U];
    Pack<T, V> added[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const std::int64_t at = unit + u * units.lanes();
      if (at < units.count) {
        packs[u] = load_streaming<V>(x + units.offset(at, channel));
        if (residual != nullptr) {
          added[u] = load_streaming<V>(residual + units.offset(at, channel));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const std::int64_t at = unit + u * units.lanes();
      if (at < units.count) {
        S values[V];
        unpack(packs[u], values);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = kRowOfChannels ? j : 0;
          values[j] = (values[j] - c.mean[k]) * c.scale[k] + c.shift[k];
        }
        if (residual != nullptr) {
          S others[V];
          unpack(added[u], others);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            values[j] += others[j];
          }
        }
        if (relu) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            values[j] = values[j] < S(0) ? S(0) : values[j];  // keeps NaN
          }
        }
        store_whole(y + units.offset(at, channel), pack_of<T>(values));
      }
    }
  });
}

/// What the kernels of backward read.
template <class T>
struct GradientInputs {
  const T* dy;
  const T* x;
  const T* y;  // null unless the relu's derivative depends on it
  ChannelParameter<T, Accumulate<T>> weight;
  ChannelParameter<T, Accumulate<T>> bias;
  const Accumulate<T>* statistics;
  bool relu;
};

template <class T, int V>
struct GradientPacks {
  Pack<T, V> dy;
  Pack<T, V> x;
  Pack<T, V> y;

  __device__ void load(const GradientInputs<T>& in, std::int64_t offset) {
    dy = load_streaming<V>(in.dy + offset);
    x = load_streaming<V>(in.x + offset);
    if (in.y != nullptr) {
      y = load_streaming<V>(in.y + offset);
    }
  }
  /// g = dy times the relu's derivative, and x − mean.
  template <int C, class S>
  __device__ void values(const GradientInputs<T>& in, const ChannelCoefficients<S, C>& c, S (&g)[V],
                         S (&centered)[V]) const {
    unpack(dy, g);
    unpack(x, centered);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      centered[j] -= c.mean[C == 1 ? 0 : j];
    }
    if (in.y != nullptr) {
      S result[V];
      unpack(y, result);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        g[j] = result[j] <= S(0) ? S(0) : g[j];
      }
    } else if (in.relu) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int k = C == 1 ? 0 : j;
        g[j] = centered[j] * c.scale[k] + c.shift[k] <= S(0) ? S(0) : g[j];
      }
    }
  }
};

template <class T, int V, bool kRowOfChannels>
__global__ void __launch_bounds__(kThreads, 2)
    batch_norm_sums_kernel(Units<V, kRowOfChannels> units, GradientInputs<T> in, Accumulate<T>* parts, T* dresidual) {
  using S = Accumulate<T>;
  constexpr int C = kRowOfChannels ? V : 1;
  constexpr int U = kUnroll<T, V>;
  __shared__ BlockSums<S, kWarp * C> shared;
  const std::int64_t channel = units.channel();
  S first[C] = {};
  S second[C] = {};
  if (channel < units.channels) {
    const ChannelCoefficients<S, C> c(in.statistics, in.weight, in.bias, units.channels, channel);
    units.template for_tiles<U, false>([&](std::int64_t unit) {
      GradientPacks<T, V> packs[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t at = unit + u * units.lanes();
        if (at < units.count) {
          packs[u].load(in, units.offset(at, channel));
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const std::int64_t at = unit + u * units.lanes();
        if (at < units.count) {
          S g[V];
          S centered[V];
          packs[u].values(in, c, g, centered);
          if (dresidual != nullptr) {
            store_whole(dresidual + units.offset(at, channel), pack_of<T>(g));
          }
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const int k = kRowOfChannels ? j : 0;
            first[k] += g[j];
            second[k] += g[j] * centered[j];
          }
        }
      }
    });
  }
  over_block<C>(shared, units.lanes_x, first, second, [&](int c, S sum, S products) {
    const std::int64_t to = kRowOfChannels ? std::int64_t{blockIdx.x} * units.lanes_x * V + c : channel;
    if (to < units.channels) {
      S* const part = parts + blockIdx.y * 2 * units.channels + to;
      part[0] = sum;
      part[units.channels] = products * in.statistics[units.channels + to];
    }
  });
}

template <class T, int V, bool kRowOfChannels>
__global__ void __launch_bounds__(kThreads, 2)
    batch_norm_dx_kernel(Units<V, kRowOfChannels> units, GradientInputs<T> in, const Accumulate<T>* sums,
                         Accumulate<T> factor, T* dx) {
  using S = Accumulate<T>;
  constexpr int C = kRowOfChannels ? V : 1;
  constexpr int U = kUnroll<T, V>;
  const std::int64_t channel = units.channel();
  if (channel >= units.channels) {
    return;
  }
  const ChannelCoefficients<S, C> c(in.statistics, in.weight, in.bias, units.channels, channel);
  // dx = scale · (g − g_mean − (x − mean) · slope)
  S g_mean[C] = {};
  S slope[C] = {};
  if (sums != nullptr) {
#pragma unroll
    for (int k = 0; k < C; ++k) {
      g_mean[k] = sums[channel + k] * factor;
      slope[k] = sums[units.channels + channel + k] * factor * c.rstd[k];
    }
  }
  units.template for_tiles<U, true>([&](std::int64_t unit) {
    GradientPacks<T, V> packs[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const std::int64_t at = unit + u * units.lanes();
      if (at < units.count) {
        packs[u].load(in, units.offset(at, channel));
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const std::int64_t at = unit + u * units.lanes();
      if (at < units.count) {
        S g[V];
        S centered[V];
        packs[u].values(in, c, g, centered);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const int k = kRowOfChannels ? j : 0;
          g[j] = c.scale[k] * (g[j] - g_mean[k] - centered[j] * slope[k]);
        }
        store_whole(dx + units.offset(at, channel), pack_of<T>(g));
      }
    }
  });
}

/// The grid of a kernel: blocks along x for the channels, along y for parts of the batch. If `sums`, parts are few,
/// since they have to be added up.
template <class T, int V, bool kRowOfChannels>
std::pair<Units<V, kRowOfChannels>, dim3> plan(const ChannelLayout& layout, bool sums) {
  constexpr int U = kUnroll<T, V>;
  Units<V, kRowOfChannels> units{.channels = layout.channels, .inner = layout.inner};
  std::int64_t tiles = layout.channels;
  units.lanes_x = 1;
  if constexpr (kRowOfChannels) {
    units.count = layout.outer;
    const std::int64_t packs = layout.channels / V;
    units.lanes_x = kWarp;
    while (units.lanes_x > 1 && (units.lanes_x / 2 >= packs || (units.lanes_x > 4 && packs % units.lanes_x != 0))) {
      units.lanes_x /= 2;
    }
    tiles = (packs + units.lanes_x - 1) / units.lanes_x;
  } else {
    units.count = layout.count() / V;
    check(units.count <= INT32_MAX, "batch_norm: expected fewer than 2^31 elements per channel, got {}",
          layout.count());
    units.in_run = cuda::Divisor(static_cast<std::uint32_t>(layout.inner / V));
  }
  const std::int64_t in_tile = std::int64_t{kThreads} / units.lanes_x * U;
  const std::int64_t all = (units.count + in_tile - 1) / in_tile;
  const std::int64_t wanted =
      sums ? kSumBlocks / tiles : std::max(kWriteBlocks / tiles, (all + kWrittenTiles - 1) / kWrittenTiles);
  units.parts = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, std::min<std::int64_t>(all, 65'535)));
  return {units, dim3(grid_of(tiles), units.parts)};
}

/// Calls f.operator()<T, V, kRowOfChannels>() for tensors like x.
template <class F, class... Tensors>
void with_kernel(const ChannelLayout& layout, DType dtype, const F& f, const Tensors&... tensors) {
  on_dtype(FloatTypes{}, dtype, "batch_norm", [&]<class T>() {
    const bool row = layout.inner == 1;
    with_pack<T>(fit_packs(row ? layout.channels : layout.inner, dtype, tensors...),
                 [&]<int V>() { row ? f.template operator()<T, V, true>() : f.template operator()<T, V, false>(); });
  });
}

template <class T>
GradientInputs<T> gradient_inputs(const BatchNormBackward& args) {
  return {.dy = args.dy.data<T>(),
          .x = args.x.data<T>(),
          .y = args.y.data_or_null<T>(),
          .weight = args.weight,
          .bias = args.bias,
          .statistics = args.statistics.data<Accumulate<T>>(),
          .relu = args.relu};
}

}  // namespace batch_norm_cuda

Tensor batch_moments(Cuda, const ChannelLayout& layout, const Tensor& x, const Tensor& num_batches_tracked) {
  Tensor result;
  batch_norm_cuda::with_kernel(
      layout, x.dtype(),
      [&]<class T, int V, bool kRowOfChannels>() {
        const auto [units, grid] = batch_norm_cuda::plan<T, V, kRowOfChannels>(layout, /*sums=*/true);
        using S = Accumulate<T>;
        result = empty({units.parts, 3, layout.channels}, dtype_of<S>, x.device());
        cuda::Launch(grid, batch_norm_cuda::kThreads)
            .run(batch_norm_cuda::batch_moments_kernel<T, V, kRowOfChannels>, "batch_moments_kernel", units,
                 x.data<T>(), result.data<S>(), num_batches_tracked.data_or_null<std::int64_t>());
      },
      x);
  return result;
}

void batch_statistics(Cuda, const BatchStatistics& args) {
  const Tensor& result = args.statistics;
  const std::int64_t channels = result.size(1);
  on_dtype(Types<float, double>{}, result.dtype(), "batch_norm", [&]<class S>() {
    const DType running = args.running_mean.defined() ? args.running_mean.dtype() : result.dtype();
    using Running = std::conditional_t<sizeof(S) == 8, Types<double>, Types<float, Float16, BFloat16>>;
    on_dtype(Running{}, running, "batch_norm", [&]<class R>() {
      if (!args.parts.defined()) {
        cuda::Launch(rows::grid_of((channels + 255) / 256), batch_norm_cuda::kThreads)
            .run(batch_norm_cuda::batch_estimates_kernel<S, R>, "batch_estimates_kernel", channels, result.data<S>(),
                 args.running_mean.data<R>(), args.running_var.data<R>(), static_cast<S>(args.eps));
        return;
      }
      cuda::Launch(rows::grid_of((channels + cuda::kWarp - 1) / cuda::kWarp),
                   dim3(cuda::kWarp, batch_norm_cuda::kMergeLanes))
          .run(batch_norm_cuda::batch_statistics_kernel<S, R>, "batch_statistics_kernel", args.parts.data<S>(),
               static_cast<int>(args.parts.size(0)), channels, args.merged.data_or_null<S>(), result.data<S>(),
               args.running_mean.data_or_null<R>(), args.running_var.data_or_null<R>(),
               args.num_batches_tracked.data_or_null<std::int64_t>(), args.momentum, args.eps);
    });
  });
}

void batch_norm_forward(Cuda, const BatchNormForward& args) {
  batch_norm_cuda::with_kernel(
      args.layout, args.x.dtype(),
      [&]<class T, int V, bool kRowOfChannels>() {
        const auto [units, grid] = batch_norm_cuda::plan<T, V, kRowOfChannels>(args.layout, /*sums=*/false);
        using Parameter = batch_norm_cuda::ChannelParameter<T, Accumulate<T>>;
        cuda::Launch(grid, batch_norm_cuda::kThreads)
            .run(batch_norm_cuda::batch_norm_forward_kernel<T, V, kRowOfChannels>, "batch_norm_forward_kernel", units,
                 args.x.data<T>(), args.residual.data_or_null<T>(), Parameter(args.weight), Parameter(args.bias),
                 args.statistics.data<Accumulate<T>>(), args.y.data<T>(), args.relu);
      },
      args.x, args.residual, args.y);
}

Tensor batch_norm_sums(Cuda, const BatchNormBackward& args, const Tensor& dresidual) {
  Tensor result;
  batch_norm_cuda::with_kernel(
      args.layout, args.x.dtype(),
      [&]<class T, int V, bool kRowOfChannels>() {
        const auto [units, grid] = batch_norm_cuda::plan<T, V, kRowOfChannels>(args.layout, /*sums=*/true);
        using S = Accumulate<T>;
        result = empty({units.parts, 2, args.layout.channels}, dtype_of<S>, args.x.device());
        cuda::Launch(grid, batch_norm_cuda::kThreads)
            .run(batch_norm_cuda::batch_norm_sums_kernel<T, V, kRowOfChannels>, "batch_norm_sums_kernel", units,
                 batch_norm_cuda::gradient_inputs<T>(args), result.data<S>(), dresidual.data_or_null<T>());
      },
      args.dy, args.x, args.y, dresidual);
  return result;
}

void batch_norm_dx(Cuda, const BatchNormBackward& args, const Tensor& sums, double factor, const Tensor& dx) {
  batch_norm_cuda::with_kernel(
      args.layout, args.x.dtype(),
      [&]<class T, int V, bool kRowOfChannels>() {
        const auto [units, grid] = batch_norm_cuda::plan<T, V, kRowOfChannels>(args.layout, /*sums=*/false);
        using S = Accumulate<T>;
        cuda::Launch(grid, batch_norm_cuda::kThreads)
            .run(batch_norm_cuda::batch_norm_dx_kernel<T, V, kRowOfChannels>, "batch_norm_dx_kernel", units,
                 batch_norm_cuda::gradient_inputs<T>(args), sums.data_or_null<S>(), static_cast<S>(factor),
                 dx.data<T>());
      },
      args.dy, args.x, args.y, dx);
}

}  // namespace mica::kernels
