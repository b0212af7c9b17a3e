#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/layer_norm_backward_cuda.cuh>

// dweight and dbias without dx, for rows of any number and length. A block has a tile of columns and some of the rows;
// blockDim.x lanes share a row, and each keeps the sums over its columns in registers. The threads, then the blocks of
// a cluster, add theirs up in order. Where more blocks than that share a tile, stage 2 adds up the partials of the
// clusters.

namespace mica::kernels::layer_norm_cuda {

using namespace rows;

namespace {

constexpr int kBlock = 256;      // threads
constexpr int kResident = 3;     // blocks on a multiprocessor: bounds the registers
constexpr int kMostCluster = 8;  // blocks
// Blocks in all, at most: an H200 has room for about so many clusters of them at a time. A number of its own, so that
// results do not depend on the chip.
constexpr int kBlocks = 320;
constexpr int kBlocksWithPartials = 192;
constexpr int kNarrowTile = 128;  // bytes
constexpr int kLeastRows = 2;     // of a thread
constexpr int kLeastBatches = 4;  // of a thread
constexpr int kManyBatches = 16;  // of a thread: partials pay

// Rows that a thread loads before it uses any.
template <class T, int V>
constexpr int kUnroll = V > 1 && sizeof(T) == 4   ? 4
                        : V > 1 && sizeof(T) == 2 ? 3
                                                  : 2;

// Packs of a row that a thread has: without 16-byte loads, enough that its lanes read long stretches all the same.
template <class T, int V>
constexpr int kPacks = V > 1 ? 1 : std::min<int>(16 / sizeof(T), 4);

template <class T, class W, int V>
__global__ void __launch_bounds__(kBlock, kResident)
    layer_norm_backward_parameters_kernel(const Backward<T, W> a, int cluster) {
  using S = Accumulate<T>;
  constexpr int U = kUnroll<T, V>;
  constexpr int P = kPacks<T, V>;
  constexpr int kMostSums = 2 * kWarp * P * V;  // of a tile: dweight, then dbias
  __shared__ __align__(16) S warp_sums[kBlock / kWarp][kMostSums];
  __shared__ S block_sums[kMostSums];
  cuda::allow_dependents();
  const int lanes = blockDim.x;
  const int tile = lanes * P * V;
  const std::int64_t begin = std::int64_t{blockIdx.x} * tile;
  const int inside = static_cast<int>(std::min<std::int64_t>(a.columns - begin, tile));
  int columns[P];  // those past the row's end read its last ones; their sums go nowhere
#pragma unroll
  for (int i = 0; i < P; ++i) {
    columns[i] = std::min<int>((i * lanes + threadIdx.x) * V, inside - V);
  }
  S dweight[P * V] = {};
  S dbias[P * V] = {};
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  std::int64_t row = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const std::int64_t offset_step = step * a.columns;
  const T* x_row = a.x + row * a.columns + begin + columns[0];
  const T* dy_row = a.dy + row * a.columns + begin + columns[0];
  // The next U rows, all of which are there or only some.
  const auto add_rows = [&](auto all) {
    Pack<T, V> xs[U][P];
    Pack<T, V> dys[U][P];
    Statistics<T> statistics[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool present = all || row < a.rows;
      statistics[u] = a.statistics(row, present);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        xs[u][i] = {};
        dys[u][i] = {};
        if (present) {
          xs[u][i] = load_streaming<V>(x_row + (columns[i] - columns[0]));
          dys[u][i] = load_streaming<V>(dy_row + (columns[i] - columns[0]));
        }
      }
      row += step;
      x_row += offset_step;
      dy_row += offset_step;
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        S x[V];
        S dy[V];
        unpack(xs[u][i], x);
        unpack(dys[u][i], dy);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dweight[i * V + j] += dy[j] * statistics[u].x_hat(x[j]);
          dbias[i * V + j] += dy[j];
        }
      }
    }
  };
#pragma unroll 1
  while (row + (U - 1) * step < a.rows) {
    add_rows(std::true_type{});
  }
  if (row < a.rows) {
    add_rows(std::false_type{});
  }

  // The rows of a warp, then of the block.
#pragma unroll 1
  for (int distance = lanes; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int k = 0; k < P * V; ++k) {
      dweight[k] += __shfl_xor_sync(kAllLanes, dweight[k], distance);
      dbias[k] += __shfl_xor_sync(kAllLanes, dbias[k], distance);
    }
  }
  const int thread = threadIdx.y * lanes + threadIdx.x;
  if (thread % kWarp < lanes) {
    S* const own = warp_sums[thread / kWarp];
#pragma unroll
    for (int i = 0; i < P; ++i) {
      Pack<S, V> dweights;
      Pack<S, V> dbiases;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dweights.at[j] = dweight[i * V + j];
        dbiases.at[j] = dbias[i * V + j];
      }
      const int column = (i * lanes + threadIdx.x) * V;
      store(own + column, dweights);
      store(own + tile + column, dbiases);
    }
  }
  __syncthreads();
  const auto sum_of_warps = [&](int k) {
    S sum = 0;
#pragma unroll
    for (int warp = 0; warp < kBlock / kWarp; ++warp) {
      sum += warp_sums[warp][k];
    }
    return sum;
  };
  // Sum number k of the tile, over the rows of the cluster.
  const auto write = [&](int k, S sum) {
    const bool bias = k >= tile;
    const int column = bias ? k - tile : k;
    if (column >= inside) {
      return;
    }
    if (static_cast<int>(gridDim.y) > cluster) {
      S* const to = bias ? a.dbiases : a.dweights;
      if (to != nullptr) {
        to[blockIdx.y / cluster * a.columns + begin + column] = sum;
      }
    } else {
      W* const to = bias ? a.dbias : a.dweight;
      if (to != nullptr) {
        to[begin + column] = static_cast<W>(sum);
      }
    }
  };
  if (cluster == 1) {
#pragma unroll 1
    for (int k = thread; k < 2 * tile; k += kBlock) {
      write(k, sum_of_warps(k));
    }
    return;
  }

  // The rows of the cluster: each block adds up a share of the sums.
#pragma unroll 1
  for (int k = thread; k < 2 * tile; k += kBlock) {
    block_sums[k] = sum_of_warps(k);
  }
  __syncthreads();
  cuda::arrive_in_cluster();
  cuda::wait_for_cluster();
  static_assert(kMostSums / 2 <= kBlock);  // a share has no more sums than a block has threads
  const int share = (2 * tile + cluster - 1) / cluster;
  const int k = cuda::cluster_rank() * share + thread;
  const bool own = thread < share && k < 2 * tile;
  S sum = 0;
  if (own) {
    S sums[kMostCluster];
#pragma unroll
    for (int rank = 0; rank < kMostCluster; ++rank) {
      sums[rank] = rank < cluster ? cuda::load_from_block(block_sums + k, rank) : S(0);
    }
#pragma unroll
    for (int rank = 0; rank < kMostCluster; ++rank) {
      sum += sums[rank];
    }
  }
  __syncthreads();
  cuda::arrive_in_cluster();  // it has read what it needs
  if (own) {
    write(k, sum);
  }
  cuda::wait_for_cluster();  // and ends when the others have
}

// On the host.

struct ParametersPlan {
  int lanes;           // that share a row
  std::int64_t tiles;  // of columns
  int parts;           // blocks that share a tile
  int cluster;         // of them, that add up their sums themselves
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The choice by shape, for lanes that have `width` columns of `bytes` each and load `unroll` rows at once.
ParametersPlan parameters_plan(std::int64_t rows, std::int64_t columns, int width, int bytes, int unroll) {
  ParametersPlan p{};
  p.lanes = 1;
  while (p.lanes < kWarp && p.lanes * width < columns) {
    p.lanes *= 2;
  }
  // Narrower tiles, where clusters would not make blocks enough and there are rows for more of them at a time.
  while (ceil_div(columns, p.lanes * width) * kMostCluster < kBlocks && p.lanes * width * bytes > kNarrowTile &&
         kBlock / p.lanes * 2 <= rows) {
    p.lanes /= 2;
  }
  p.tiles = ceil_div(columns, p.lanes * width);
  const std::int64_t thread_rows = rows * p.lanes / kBlock;  // if a block had a tile alone
  const std::int64_t most = std::min(kBlocks / p.tiles, thread_rows / kLeastRows);
  p.parts = static_cast<int>(std::clamp<std::int64_t>(most, 1, kMostCluster));
  if (p.parts == kMostCluster && thread_rows >= kMostCluster * kManyBatches * unroll) {
    p.parts *=
        static_cast<int>(std::max<std::int64_t>(1, std::min(kBlocksWithPartials / (kMostCluster * p.tiles),
                                                            thread_rows / (kMostCluster * kLeastBatches * unroll))));
  }
  p.cluster = std::min(p.parts, kMostCluster);
  if (!cuda::device_has_clusters()) {
    p.cluster = 1;
  }
  return p;
}

}  // namespace

template <class T, class W>
void backward_parameters(Backward<T, W> a, Device device) {
  if (a.dweight == nullptr && a.dbias == nullptr) {
    return;
  }
  with_pack_size<T>(
      a.columns,
      [&]<int V>(std::integral_constant<int, V>) {
        const ParametersPlan p =
            parameters_plan(a.rows, a.columns, V * kPacks<T, V>, static_cast<int>(sizeof(T)), kUnroll<T, V>);
        const int partial_rows = p.parts / p.cluster;
        Tensor partials;
        if (partial_rows > 1) {
          partials = allocate_partials(a, partial_rows, device);
        }
        cuda::Launch(dim3(grid_of(p.tiles), p.parts), dim3(p.lanes, kBlock / p.lanes))
            .cluster(dim3(1, p.cluster))
            .run(layer_norm_backward_parameters_kernel<T, W, V>, "layer_norm_backward_parameters_kernel", a, p.cluster);
        if (partial_rows > 1) {
          add_partials(a, partial_rows);
        }
      },
      a.dy, a.x);
}

#define MICA_INSTANTIATE(T, W) template void backward_parameters(Backward<T, W>, Device)
MICA_FOR_ROW_TYPES(MICA_INSTANTIATE);

}  // namespace mica::kernels::layer_norm_cuda
