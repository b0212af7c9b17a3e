#pragma once

// Softmax element by element, which reads everything twice: rows that are not aligned to 16 bytes, those that are too
// long for registers, and other axes than the last.

#include <mica/ops/rows/detail/row_loop.cuh>
#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// Loads in flight, of each input.
template <class Direction>
constexpr int kAtOnce = (sizeof(typename Direction::T) == 8 ? 4 : 8) / Direction::Inputs::kInputs;

template <class Direction>
__device__ auto reduced_elements(const Direction& direction, const typename Direction::Inputs& m, std::int64_t first,
                                 std::int64_t end, std::int64_t step) {
  auto found = Direction::Found::nothing();
  rows::for_strided<kAtOnce<Direction>>(
      m.in, first, end, step, Direction::kAbsent,
      [&](std::int64_t, const auto& elements, const auto& inside) { direction.add(found, elements, inside); });
  return found;
}

template <class Direction>
__device__ void write_elements(const Direction& direction, const typename Direction::Inputs& m, std::int64_t first,
                               std::int64_t end, std::int64_t step, const typename Direction::Found& found) {
  const auto prepared = direction.prepared(found);
  rows::for_strided<kAtOnce<Direction>>(
      m.in, first, end, step, Direction::kAbsent, [&](std::int64_t i, const auto& elements, const auto& inside) {
#pragma unroll
        for (int n = 0; n < kAtOnce<Direction>; ++n) {
          if (inside(n)) {
            m.out[i + n * step] = static_cast<typename Direction::T>(direction.write(elements[n], found, prepared));
          }
        }
      });
}

/// A row for kLanes lanes of a warp, or for a block. Which elements a thread has does not depend on the row's address.
template <class Direction, Group kGroup, int kLanes>
__global__ void __launch_bounds__(rows::kMostGroupThreads, sizeof(typename Direction::T) == 8 ? 1 : 2)
    softmax_looped(typename Direction::Inputs m, std::int64_t rows, std::int64_t columns, Direction direction) {
  using Threads = rows::RowGroup<typename Direction::Found, kGroup, kLanes>;
  __shared__ typename Threads::Exchange exchange;
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const std::int64_t first = row * columns + threadIdx.x;
  const std::int64_t end = row < rows ? row * columns + direction.seen(row, columns) : 0;  // others only shuffle
  const auto found = Threads(exchange).all_reduce(reduced_elements(direction, m, first, end, blockDim.x));
  write_elements(direction, m, first, end, blockDim.x, found);
  if (Direction::kMasked && row < rows) {
    for (std::int64_t i = end + threadIdx.x; i < (row + 1) * columns; i += blockDim.x) {
      m.out[i] = static_cast<typename Direction::T>(0.0f);
    }
  }
}

constexpr int kColumns = 32;
constexpr int kColumnThreads = 8;

/// Softmax along the middle axis of (outer, n, inner). A block has 32 adjacent columns, with 8 threads per column:
///
///     lane     0  1  2 …  31
///     warp 0   ↓  ↓  ↓     ↓    elements 0, 8, 16, … of 32 columns
///     warp 1   ↓  ↓  ↓     ↓    elements 1, 9, 17, …
///     …
///     warp 7   ↓  ↓  ↓     ↓    elements 7, 15, 23, …
///
/// They combine their results through shared memory, in the order of the threads.
template <class Direction>
__global__ void __launch_bounds__(kColumns* kColumnThreads, sizeof(typename Direction::T) == 8 ? 1 : 4)
    softmax_columns(typename Direction::Inputs m, std::int64_t outer, std::int64_t n, std::int64_t inner,
                    Direction direction) {
  using Found = typename Direction::Found;
  __shared__ Found parts[kColumnThreads][kColumns];
  const std::int64_t tiles = (inner + kColumns - 1) / kColumns;
  for (std::int64_t block = blockIdx.x; block < outer * tiles; block += gridDim.x) {
    const std::int64_t column = block % tiles * kColumns + threadIdx.x;
    const std::int64_t begin = block / tiles * n * inner + column;
    const std::int64_t first = begin + threadIdx.y * inner;
    const std::int64_t end = column < inner ? begin + n * inner : begin;
    const std::int64_t step = kColumnThreads * inner;
    __syncthreads();  // the previous column's results have been read
    parts[threadIdx.y][threadIdx.x] = reduced_elements(direction, m, first, end, step);
    __syncthreads();
    Found found = parts[0][threadIdx.x];
    for (int i = 1; i < kColumnThreads; ++i) {
      found.join(parts[i][threadIdx.x]);
    }
    write_elements(direction, m, first, end, step, found);
  }
}

}  // namespace mica::kernels::softmax_rows
