#pragma once

// Scans of rows on CUDA. A row is split into chunks of one thread block each. There are three kernels, or the last
// alone for a single chunk:
//
//   1. chunks   [ join of chunk 0 | join of chunk 1 | … ]          one block per chunk
//   2. starts   [ – | chunk 0 | chunks 0 and 1 | … ]               one thread per row, overwrites the joins
//   3. scan     the scan within each chunk, joined to its start    one block per chunk
//
// The order of all joins depends on n alone, which cub::DeviceScan does not guarantee.

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <climits>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>

namespace mica::kernels {

namespace scans {

inline constexpr int kThreads = 256;
inline constexpr int kItems = 4;                 // elements that a thread processes at a time
inline constexpr int kTile = kThreads * kItems;  // elements that a block processes at a time
inline constexpr int kChunk = 8 * kTile;

template <class Scan>
struct Join {
  __device__ typename Scan::Item operator()(const typename Scan::Item& a, const typename Scan::Item& b) const {
    return Scan::join(a, b);
  }
};

/// The chunk of a thread block.
struct Chunk {
  std::int64_t row;
  std::int64_t begin;
  std::int64_t end;

  __device__ Chunk(std::int64_t n, std::int64_t chunks)
      : row(blockIdx.x / chunks), begin((blockIdx.x - row * chunks) * kChunk), end(min(begin + kChunk, n)) {}
};

template <class Scan>
__global__ void __launch_bounds__(kThreads)
    scan_chunks_kernel(Scan scan, typename Scan::Carry* joined, std::int64_t n, std::int64_t chunks) {
  using Item = typename Scan::Item;
  using Carry = typename Scan::Carry;
  using Reduce = cub::BlockReduce<Item, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const Chunk chunk(n, chunks);
  Carry carry{};
  for (std::int64_t first = chunk.begin; first < chunk.end; first += kTile) {
    Item item = Scan::identity();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const std::int64_t j = first + threadIdx.x * kItems + k;
      const Item next = j < chunk.end ? scan.load(chunk.row, j) : Scan::identity();
      item = k == 0 ? next : Scan::join(item, next);
    }
    item = Reduce(storage).Reduce(item, Join<Scan>{});
    if (threadIdx.x == 0) {
      carry = first == chunk.begin ? static_cast<Carry>(item) : Scan::join_carry(carry, static_cast<Carry>(item));
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    joined[blockIdx.x] = carry;
  }
}

template <class Scan>
__global__ void scan_starts_kernel(typename Scan::Carry* joined, std::int64_t rows, std::int64_t chunks) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) {
    return;
  }
  typename Scan::Carry carry = joined[row * chunks];
  for (std::int64_t c = 1; c < chunks; ++c) {
    const typename Scan::Carry next = joined[row * chunks + c];
    joined[row * chunks + c] = carry;
    carry = Scan::join_carry(carry, next);
  }
}

template <class Scan>
__global__ void __launch_bounds__(kThreads)
    scan_kernel(Scan scan, const typename Scan::Carry* starts, std::int64_t n, std::int64_t chunks) {
  using Item = typename Scan::Item;
  using Carry = typename Scan::Carry;
  using BlockScan = cub::BlockScan<Item, kThreads>;
  __shared__ typename BlockScan::TempStorage storage;
  __shared__ Item tile[kTile];  // makes loads and stores coalesced, although a thread scans adjacent elements
  const Chunk chunk(n, chunks);
  Carry before{};
  if (chunk.begin > 0) {
    before = starts[blockIdx.x];
  }
  for (std::int64_t first = chunk.begin; first < chunk.end; first += kTile) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int j = k * kThreads + static_cast<int>(threadIdx.x);
      tile[j] = first + j < chunk.end ? scan.load(chunk.row, first + j) : Scan::identity();
    }
    __syncthreads();
    Item items[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      items[k] = tile[threadIdx.x * kItems + k];
    }
    Item total;
    BlockScan(storage).InclusiveScan(items, items, Join<Scan>{}, total);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      // There is nothing before a row: joining an identity would turn an infinity into NaN, as in 0 · ∞.
      tile[threadIdx.x * kItems + k] =
          first == 0 ? items[k] : static_cast<Item>(Scan::join_carry(before, static_cast<Carry>(items[k])));
    }
    before = first == 0 ? static_cast<Carry>(total) : Scan::join_carry(before, static_cast<Carry>(total));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int j = k * kThreads + static_cast<int>(threadIdx.x);
      if (first + j < chunk.end) {
        scan.store(chunk.row, first + j, tile[j]);
      }
    }
    __syncthreads();
  }
}

}  // namespace scans

/// Scans the rows of a matrix of the shape of x, with at least one column: see scan_bodies.h.
template <class Scan>
void scan_rows(Cuda, const Scan& scan, const Tensor& x) {
  using Carry = typename Scan::Carry;
  const std::int64_t rows = x.shape()[0];
  const std::int64_t n = x.shape()[1];
  if (rows == 0) {
    return;
  }
  const std::int64_t chunks = (n + scans::kChunk - 1) / scans::kChunk;
  check(rows <= INT_MAX / chunks, "scan: expected at most {} blocks of {} elements, got {} rows of {} elements",
        INT_MAX, scans::kChunk, rows, n);
  const auto blocks = static_cast<unsigned>(rows * chunks);
  const cudaStream_t stream = cuda::current_stream();
  const std::int64_t carried = chunks > 1 ? rows * chunks : 0;
  const Tensor buffer = empty({carried * static_cast<std::int64_t>(sizeof(Carry))}, uint8, x.device());
  auto* const carries = reinterpret_cast<Carry*>(buffer.raw_data());
  if (chunks > 1) {
    scans::scan_chunks_kernel<Scan><<<blocks, scans::kThreads, 0, stream>>>(scan, carries, n, chunks);
    cuda::check_launch("scan_chunks_kernel");
    const auto row_blocks = static_cast<unsigned>((rows + scans::kThreads - 1) / scans::kThreads);
    scans::scan_starts_kernel<Scan><<<row_blocks, scans::kThreads, 0, stream>>>(carries, rows, chunks);
    cuda::check_launch("scan_starts_kernel");
  }
  scans::scan_kernel<Scan><<<blocks, scans::kThreads, 0, stream>>>(scan, carries, n, chunks);
  cuda::check_launch("scan_kernel");
}

}  // namespace mica::kernels
