#pragma once

// Softmax element by element: rows that are not aligned to 16 bytes, those that are too long for registers, and other
// axes than the last. A thread keeps its first elements in registers and reads the others twice.

#include <mica/ops/rows/detail/row_loop.cuh>
#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// A thread's elements of a row: those at first, first + step, … < end. It keeps the first N of each input.
template <class Direction, int N>
class StridedElements {
  using T = typename Direction::T;
  using S = Accumulate<T>;
  using Inputs = typename Direction::Inputs;
  using Found = typename Direction::Found;

 public:
  __device__ StridedElements(const Direction& direction, const Inputs& m, std::int64_t first, std::int64_t end,
                             std::int64_t step)
      : direction_(direction), m_(m), first_(first), end_(end), step_(step) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int k = 0; k < Inputs::kInputs; ++k) {
        kept_[n].at[k] = inside(n) ? static_cast<S>(m.in[k][first + n * step]) : Direction::kAbsent;
      }
    }
  }

  __device__ Found reduced() const {
    auto found = Found::nothing();
    direction_.add(found, kept_, [&](int n) { return inside(n); });
    for_others(
        [&](std::int64_t, const auto& elements, const auto& inside) { direction_.add(found, elements, inside); });
    return found;
  }

  __device__ void write(const Found& found) const {
    const auto prepared = direction_.prepared(found);
    const auto write_batch = [&](std::int64_t i, const auto& elements, const auto& inside) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (inside(n)) {
          m_.out[i + n * step_] = static_cast<T>(direction_.write(elements[n], found, prepared));
        }
      }
    };
    write_batch(first_, kept_, [&](int n) { return inside(n); });
    for_others(write_batch);
  }

 private:
  __device__ bool inside(int n) const { return first_ + n * step_ < end_; }

  /// Reads the elements that are not kept, in batches of N, for f(i, elements, inside); see rows::for_strided().
  template <class F>
  __device__ void for_others(const F& f) const {
    rows::for_strided<N>(m_.in, first_ + N * step_, end_, step_, Direction::kAbsent, f);
  }

  const Direction& direction_;
  const Inputs& m_;
  std::int64_t first_;
  std::int64_t end_;
  std::int64_t step_;
  typename Direction::Element kept_[N];
};

/// How many elements a thread keeps: all of them in rows of up to kMostWarpColumns (softmax_plan.cpp), and in longer
/// ones of up to 8192 columns, or half as many of float64.
template <class Direction>
constexpr int kKept = sizeof(typename Direction::T) == 8 ? 8 : 16;

/// The most threads of a block of softmax_looped.
template <Group kGroup>
constexpr int kMostLoopedThreads = kGroup == Group::block ? rows::kMostGroupThreads : 256;

/// A row for kLanes lanes of a warp, or for a block. Which elements a thread has does not depend on the row's address.
template <class Direction, Group kGroup, int kLanes>
__global__ void __launch_bounds__(kMostLoopedThreads<kGroup>)
    softmax_looped(typename Direction::Inputs m, std::int64_t rows, std::int64_t columns, Direction direction) {
  using Threads = rows::RowGroup<typename Direction::Found, kGroup, kLanes>;
  __shared__ typename Threads::Exchange exchange;
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const std::int64_t first = row * columns + threadIdx.x;
  const std::int64_t end = row < rows ? row * columns + direction.seen(row, columns) : 0;  // others only shuffle
  const StridedElements<Direction, kKept<Direction>> elements(direction, m, first, end, blockDim.x);
  elements.write(Threads(exchange).all_reduce(elements.reduced()));
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
    const StridedElements<Direction, kKept<Direction> / 2> elements(direction, m, first, end, step);
    __syncthreads();  // the previous column's results have been read
    parts[threadIdx.y][threadIdx.x] = elements.reduced();
    __syncthreads();
    Found found = parts[0][threadIdx.x];
    for (int i = 1; i < kColumnThreads; ++i) {
      found.join(parts[i][threadIdx.x]);
    }
    elements.write(found);
  }
}

}  // namespace mica::kernels::softmax_rows
