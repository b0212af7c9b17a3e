#include <algorithm>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

// dweight and dbias without dx, for any number of rows of any length. A block has a tile of columns and some of the
// rows; blockDim.x lanes share a row:
//
//     x, dy ──▶ a thread's sums of its columns ──shuffles──▶ a warp's sums ──shared memory──▶ a block's sums
//           ──distributed shared memory──▶ a cluster's sums ──▶ dweight, dbias
//
// Each step adds in a fixed order. If several clusters share a tile, their sums are partial sums, which stage 2 adds
// up.

namespace mica::kernels::norm_cuda {

namespace {

constexpr int kBlock = kParametersBlock;
constexpr int kMostCluster = kParametersCluster;
constexpr int kResident = 3;  // blocks per multiprocessor (__launch_bounds__), which limits the registers

// Rows that a thread loads before it uses the first.
template <class T, int V>
constexpr int kUnroll = V == 1           ? 2
                        : sizeof(T) == 4 ? 4
                                         : 3;

// Packs of a row per thread. With loads of single elements, a thread has several, so that the lanes of a row still read
// long contiguous runs.
template <class T, int V>
constexpr int kPacks = V > 1 ? 1 : std::min<int>(16 / sizeof(T), 4);

// A thread's part in the kernel.
template <class T, class W, int V>
class ParameterSums {
 public:
  using S = Accumulate<T>;
  static constexpr int P = kPacks<T, V>;
  static constexpr int kMost = 2 * kWarp * P * V;  // the most sums of a tile: dweight's, then dbias's
  struct ParameterMemory {
    __align__(16) S of_warps[kBlock / kWarp][kMost];
    S of_block[kMost];
  };

  __device__ ParameterSums(const BackwardRows<T, W>& a, int cluster, ParameterMemory& shared)
      : a_(a),
        cluster_(cluster),
        shared_(shared),
        lanes_(blockDim.x),
        tile_(lanes_ * P * V),
        begin_(std::int64_t{blockIdx.x} * tile_),
        inside_(static_cast<int>(std::min<std::int64_t>(a.columns - begin_, tile_))) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      columns_[i] = std::min<int>((i * lanes_ + threadIdx.x) * V, inside_ - V);
    }
  }

  __device__ void add_rows() {
    const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
    std::int64_t row = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
    const std::int64_t first = row * a_.columns + begin_ + columns_[0];
    const T* x = a_.x + first;
    const T* dy = a_.dy + first;
#pragma unroll 1
    while (row + (U - 1) * step < a_.rows) {
      add_batch<true>(row, step, x, dy);
    }
    if (row < a_.rows) {
      add_batch<false>(row, step, x, dy);
    }
  }

  /// Adds up the sums of each warp's threads and writes them to shared memory.
  __device__ void add_lanes() {
#pragma unroll 1
    for (int distance = lanes_; distance < kWarp; distance *= 2) {
#pragma unroll
      for (int k = 0; k < P * V; ++k) {
        dweight_[k] += __shfl_xor_sync(kAllLanes, dweight_[k], distance);
        dbias_[k] += __shfl_xor_sync(kAllLanes, dbias_[k], distance);
      }
    }
    if (thread() % kWarp < lanes_) {
      S* const own = shared_.of_warps[thread() / kWarp];
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const int column = (i * lanes_ + threadIdx.x) * V;
        store(own + column, pack_at(dweight_, i));
        store(own + tile_ + column, pack_at(dbias_, i));
      }
    }
    __syncthreads();
  }

  /// Adds up the sums of the warps, then those of the cluster's blocks, and writes the results.
  __device__ void add_warps_and_blocks() {
    const int sums = 2 * tile_;
    if (cluster_ == 1) {
#pragma unroll 1
      for (int k = thread(); k < sums; k += kBlock) {
        write(k, sum_of_warps(k));
      }
      return;
    }
#pragma unroll 1
    for (int k = thread(); k < sums; k += kBlock) {
      shared_.of_block[k] = sum_of_warps(k);
    }
    __syncthreads();
    cuda::arrive_in_cluster();
    cuda::wait_for_cluster();
    static_assert(kMost / 2 <= kBlock);  // a thread adds at most one sum over the blocks
    const int block_sums = (sums + cluster_ - 1) / cluster_;
    const int k = cuda::cluster_rank() * block_sums + thread();
    const bool own = thread() < block_sums && k < sums;
    const S sum = own ? sum_of_blocks(k) : S(0);
    __syncthreads();
    cuda::arrive_in_cluster();  // this thread has read the other blocks' sums
    if (own) {
      write(k, sum);
    }
    cuda::wait_for_cluster();  // a block must not exit while another one reads its shared memory
  }

 private:
  static constexpr int U = kUnroll<T, V>;

  // Adds the next U rows. kAll: all of them exist.
  template <bool kAll>
  __device__ void add_batch(std::int64_t& row, std::int64_t step, const T*& x_row, const T*& dy_row) {
    Pack<T, V> xs[U][P];
    Pack<T, V> dys[U][P];
    Statistics<T, true> statistics[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool present = kAll || row < a_.rows;
      statistics[u] = a_.any_statistics(row, present);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        xs[u][i] = {};
        dys[u][i] = {};
        if (present) {
          xs[u][i] = load_streaming<V>(x_row + (columns_[i] - columns_[0]));
          dys[u][i] = load_streaming<V>(dy_row + (columns_[i] - columns_[0]));
        }
      }
      row += step;
      x_row += step * a_.columns;
      dy_row += step * a_.columns;
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
          dweight_[i * V + j] += dy[j] * statistics[u].x_hat(x[j]);
          dbias_[i * V + j] += dy[j];
        }
      }
    }
  }

  __device__ static Pack<S, V> pack_at(const S* sums, int i) {
    Pack<S, V> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      pack.at[j] = sums[i * V + j];
    }
    return pack;
  }

  __device__ S sum_of_warps(int k) const {
    S sum = 0;
#pragma unroll
    for (int warp = 0; warp < kBlock / kWarp; ++warp) {
      sum += shared_.of_warps[warp][k];
    }
    return sum;
  }

  __device__ S sum_of_blocks(int k) const {
    S sums[kMostCluster];
#pragma unroll
    for (int rank = 0; rank < kMostCluster; ++rank) {
      sums[rank] = rank < cluster_ ? cuda::load_from_block(shared_.of_block + k, rank) : S(0);
    }
    S sum = 0;
#pragma unroll
    for (int rank = 0; rank < kMostCluster; ++rank) {
      sum += sums[rank];
    }
    return sum;
  }

  // Writes sum number k of the tile, over the cluster's rows.
  __device__ void write(int k, S sum) const {
    const bool bias = k >= tile_;
    const int column = bias ? k - tile_ : k;
    if (column >= inside_) {
      return;
    }
    if (static_cast<int>(gridDim.y) > cluster_) {
      S* const to = bias ? a_.dbiases : a_.dweights;
      if (to != nullptr) {
        to[blockIdx.y / cluster_ * a_.columns + begin_ + column] = sum;
      }
    } else {
      W* const to = bias ? a_.dbias : a_.dweight;
      if (to != nullptr) {
        to[begin_ + column] = static_cast<W>(sum);
      }
    }
  }

  __device__ int thread() const { return threadIdx.y * lanes_ + threadIdx.x; }

  const BackwardRows<T, W>& a_;
  const int cluster_;
  ParameterMemory& shared_;
  const int lanes_;           // lanes that share a row
  const int tile_;            // columns
  const std::int64_t begin_;  // the tile's first column
  const int inside_;          // columns of the tile that exist
  // The thread's columns. Past the row's end, the row's last columns take their place, and their sums are not written.
  int columns_[P];
  S dweight_[P * V] = {};
  S dbias_[P * V] = {};
};

template <class T, class W, int V>
__global__ void __launch_bounds__(kBlock, kResident)
    norm_backward_parameters_kernel(const BackwardRows<T, W> a, int cluster) {
  using Sums = ParameterSums<T, W, V>;
  __shared__ typename Sums::ParameterMemory shared;
  cuda::allow_dependents();
  Sums sums(a, cluster, shared);
  sums.add_rows();
  sums.add_lanes();
  sums.add_warps_and_blocks();
}

template <class T, class W, int V>
void launch(const NormBackward& args) {
  const ParametersPlan p = plan_parameters(args.rows, args.columns, V * kPacks<T, V>, static_cast<int>(sizeof(T)),
                                           kUnroll<T, V>, cuda::device_has_clusters());
  const Tensor partials = p.partial_rows() > 1 ? allocate_partials(args, p.partial_rows()) : Tensor();
  cuda::Launch(dim3(grid_of(p.tiles), p.parts), dim3(p.lanes, kBlock / p.lanes))
      .cluster(dim3(1, p.cluster))
      .run(norm_backward_parameters_kernel<T, W, V>, "norm_backward_parameters_kernel", rows_of<T, W>(args, partials),
           p.cluster);
  add_partials(args, partials);
}

}  // namespace

void backward_parameters(const NormBackward& args) {
  if (!args.dweight.defined() && !args.dbias.defined()) {
    return;
  }
  const bool packs = fit_packs(args.columns, args.x.dtype(), args.dy, args.x);
  on_norm<8>(args, [&]<bool, class T, class W>() { with_pack<T>(packs, [&]<int V>() { launch<T, W, V>(args); }); });
}

}  // namespace mica::kernels::norm_cuda
