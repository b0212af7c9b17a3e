#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <type_traits>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/scan/detail/scan_kernels.h>

namespace mica::kernels {

namespace {

// A row is split into chunks of one thread block each. There are three kernels, or the last alone for a single chunk:
//
//   1. sums     [ Σ chunk 0 | Σ chunk 1 | Σ chunk 2 | … ]                  one block per chunk
//   2. starts   [ 0 | Σ chunk 0 | Σ chunk 0 + Σ chunk 1 | … ]              one thread per row, overwrites the sums
//   3. scan     the cumulative sums within each chunk, plus its start      one block per chunk
//
// The order of all additions depends on n alone, which cub::DeviceScan does not guarantee. Chunks and starts are summed
// in double for floats, since float would lose the small terms of a long sum.

constexpr int kThreads = 256;
constexpr int kItems = 4;                 // elements that a thread processes at a time
constexpr int kTile = kThreads * kItems;  // elements that a block processes at a time
constexpr int kChunk = 8 * kTile;

template <class S>
struct Plus {
  __device__ S operator()(S a, S b) const { return a + b; }
};

/// The type of starts, where S is the type in which tiles are summed.
template <class S>
using Start = std::conditional_t<std::is_integral_v<S>, S, double>;

template <class T, class S>
struct Row {
  const T* x;
  T* y;
  Start<S>* sums;  // (rows, chunks)
  std::int64_t n;
  std::int64_t chunks;
  bool reverse;

  __device__ std::int64_t at(std::int64_t row, std::int64_t j) const { return row * n + (reverse ? n - 1 - j : j); }
  __device__ S element(std::int64_t row, std::int64_t j, std::int64_t end) const {
    return j < end ? static_cast<S>(x[at(row, j)]) : S{0};
  }
};

template <class T, class S>
__global__ void __launch_bounds__(kThreads) cumsum_chunks_kernel(Row<T, S> a) {
  using B = Start<S>;
  using Reduce = cub::BlockReduce<B, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const std::int64_t row = blockIdx.x / a.chunks;
  const std::int64_t begin = (blockIdx.x - row * a.chunks) * kChunk;
  const std::int64_t end = min(begin + kChunk, a.n);
  B sum = 0;
  for (std::int64_t j = begin + threadIdx.x; j < end; j += kThreads) {
    sum += a.element(row, j, end);
  }
  sum = Reduce(storage).Reduce(sum, Plus<B>{});
  if (threadIdx.x == 0) {
    a.sums[blockIdx.x] = sum;
  }
}

template <class B>
__global__ void cumsum_starts_kernel(B* sums, std::int64_t rows, std::int64_t chunks) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  B sum = 0;
  for (std::int64_t c = 0; row < rows && c < chunks; ++c) {
    const B next = sums[row * chunks + c];
    sums[row * chunks + c] = sum;
    sum += next;
  }
}

template <class T, class S>
__global__ void __launch_bounds__(kThreads) cumsum_kernel(Row<T, S> a) {
  using Scan = cub::BlockScan<S, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ S tile[kTile];  // makes loads and stores coalesced, although a thread scans adjacent elements
  const std::int64_t row = blockIdx.x / a.chunks;
  const std::int64_t begin = (blockIdx.x - row * a.chunks) * kChunk;
  const std::int64_t end = min(begin + kChunk, a.n);
  Start<S> before = a.chunks > 1 ? a.sums[blockIdx.x] : Start<S>{0};
  for (std::int64_t first = begin; first < end; first += kTile) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int j = k * kThreads + static_cast<int>(threadIdx.x);
      tile[j] = a.element(row, first + j, end);
    }
    __syncthreads();
    S items[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      items[k] = tile[threadIdx.x * kItems + k];
    }
    S total;
    Scan(storage).InclusiveScan(items, items, Plus<S>{}, total);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      tile[threadIdx.x * kItems + k] = static_cast<S>(before + items[k]);
    }
    before += total;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int j = k * kThreads + static_cast<int>(threadIdx.x);
      if (first + j < end) {
        a.y[a.at(row, first + j)] = static_cast<T>(tile[j]);
      }
    }
    __syncthreads();
  }
}

}  // namespace

void cumsum(Cuda, const Cumsum& args) {
  const std::int64_t rows = args.x.shape()[0];
  const std::int64_t n = args.x.shape()[1];
  if (args.x.numel() == 0) {
    return;
  }
  const std::int64_t chunks = (n + kChunk - 1) / kChunk;
  check(rows <= INT_MAX / chunks, "cumsum: expected at most {} blocks of {} elements, got {} rows of {} elements",
        INT_MAX, kChunk, rows, n);
  const auto blocks = static_cast<unsigned>(rows * chunks);
  const cudaStream_t stream = cuda::current_stream();
  on_dtype(ScannedTypes{}, args.x.dtype(), "cumsum", [&]<class T>() {
    using S = std::conditional_t<std::is_integral_v<T>, std::uint64_t, Accumulate<T>>;
    const Tensor sums =
        empty({chunks > 1 ? rows * chunks : 0}, std::is_integral_v<T> ? int64 : float64, args.x.device());
    const Row<T, S> row{.x = args.x.data<T>(),
                        .y = args.y.data<T>(),
                        .sums = reinterpret_cast<Start<S>*>(sums.raw_data()),
                        .n = n,
                        .chunks = chunks,
                        .reverse = args.reverse};
    if (chunks > 1) {
      cumsum_chunks_kernel<T, S><<<blocks, kThreads, 0, stream>>>(row);
      cuda::check_launch("cumsum_chunks_kernel");
      const auto row_blocks = static_cast<unsigned>((rows + kThreads - 1) / kThreads);
      cumsum_starts_kernel<<<row_blocks, kThreads, 0, stream>>>(row.sums, rows, chunks);
      cuda::check_launch("cumsum_starts_kernel");
    }
    cumsum_kernel<T, S><<<blocks, kThreads, 0, stream>>>(row);
    cuda::check_launch("cumsum_kernel");
  });
}

}  // namespace mica::kernels
