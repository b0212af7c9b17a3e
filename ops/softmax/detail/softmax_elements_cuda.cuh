#pragma once

// Softmax element by element: of long rows that are not aligned to 16 bytes, of those that are too long for registers,
// and along other axes than the last.

#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

constexpr int kElementThreads = rows::kMostGroupThreads;  // the most threads of a block

/// Calls f(i, elements) with one or several elements, at i, i + step, …, for all of first, first + step, … < end.
/// Index: int or std::int64_t.
template <class Direction, class Index, class F>
__device__ void for_elements(const typename Direction::Inputs& from, Index first, Index end, Index step, const F& f) {
  constexpr int kAtOnce = sizeof(typename Direction::T) == 8 ? 2 : 4;  // loads in flight
  const auto some = [&]<int N>(Index i) {
    typename Direction::Element elements[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int k = 0; k < from.kInputs; ++k) {
        elements[n].at[k] = static_cast<typename Direction::S>(from.in[k][i + n * step]);
      }
    }
    f(i, elements);
  };
  Index i = first;
  for (; i < end - (kAtOnce - 1) * step; i += kAtOnce * step) {
    some.template operator()<kAtOnce>(i);
  }
#pragma unroll 1
  for (; i < end; i += step) {
    some.template operator()<1>(i);
  }
}

template <class Direction, class Index>
__device__ auto reduced_elements(const Direction& direction, const typename Direction::Inputs& from, Index first,
                                 Index end, Index step) {
  auto found = Direction::Found::nothing();
  for_elements<Direction>(from, first, end, step, [&](Index, const auto& elements) { direction.add(found, elements); });
  return found;
}

template <class Direction, class Index, class T>
__device__ void write_elements(const Direction& direction, const typename Direction::Inputs& from, T* to, Index first,
                               Index end, Index step, const typename Direction::Found& found) {
  const auto prepared = direction.prepared(found);
  for_elements<Direction>(from, first, end, step, [&](Index i, const auto& elements) {
#pragma unroll
    for (const auto& element : elements) {
      to[i] = static_cast<T>(direction.write(element, found, prepared));
      i += step;
    }
  });
}

/// Bytes of shared memory for a part of a row in stage().
template <class T>
constexpr std::int64_t staged_bytes(std::int64_t columns) {
  constexpr int kUnit = 16 / sizeof(T);
  return (columns + 2 * kUnit - 1) / kUnit * 16;
}

/// Starts copying `count` elements to shared memory and returns the copy's address. It has the same offset from a
/// multiple of 16 bytes, so that units of 16 bytes can be copied as a whole. The unaligned ends, which have fewer
/// elements than the block has threads, are copied one by one.
template <class T>
__device__ const T* stage(const T* from, int count, unsigned char* memory, std::uint64_t policy) {
  constexpr int kUnit = 16 / sizeof(T);
  const int offset = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16 / sizeof(T));
  const int head = min(count, (kUnit - offset) % kUnit);
  const int units = (count - head) / kUnit;
  const int thread = static_cast<int>(threadIdx.x);
  T* const to = reinterpret_cast<T*>(memory) + offset;
#pragma unroll 4
  for (int i = thread; i < units; i += static_cast<int>(blockDim.x)) {
    const int column = head + i * kUnit;
    cuda::copy_async<16>(cuda::shared_address(to + column), from + column, policy);
  }
  if (thread < count - units * kUnit) {
    const int column = thread < head ? thread : thread + units * kUnit;
    to[column] = from[column];
  }
  return to;
}

/// A row per block, or per cluster. If kStaged, it is read once, into shared memory; otherwise it is read twice. The
/// order of its sum is counted from its beginning, so that the result does not depend on its address.
template <class Direction, Group kGroup, bool kStaged>
__global__ void __launch_bounds__(kElementThreads, sizeof(typename Direction::T) == 8 ? 1 : 3)
    softmax_elements(typename Direction::Inputs m, std::int64_t rows, std::int64_t columns, Direction direction,
                     RowPlan plan) {
  using T = typename Direction::T;
  using Found = typename Direction::Found;
  using Index = std::conditional_t<kStaged, int, std::int64_t>;
  using Threads = rows::RowGroup<Found, kGroup>;
  __shared__ typename Threads::Shared shared;

  Threads threads(shared, plan.cluster);
  const Place<kGroup> at(plan, rows, columns);
  Index end = 0;
  Index seen = 0;
  m.move(at.row * columns + at.begin);
  T* const to = m.out;
  if constexpr (kStaged) {
    extern __shared__ __align__(16) unsigned char memory[];
    end = at.columns;
    seen = direction.seen(at, columns);
    const std::int64_t bytes = m.kInputs * rows * columns * static_cast<int>(sizeof(T));
    for (int i = 0; i < m.kInputs; ++i) {
      m.in[i] = stage(m.in[i], seen, memory + i * staged_bytes<T>(plan.slab), cuda::read_once_policy(bytes));
    }
    cuda::commit_copies();
    cuda::wait_copies<0>();
    __syncthreads();
  } else {
    end = columns;
    seen = direction.seen(at.row, columns);
  }

  const auto first = static_cast<Index>(threadIdx.x);
  const auto step = static_cast<Index>(blockDim.x);
  const Found found = threads.all_reduce(reduced_elements(direction, m, first, seen, step));
  write_elements(direction, m, to, first, seen, step, found);
  for (Index i = seen + first; i < end; i += step) {
    to[i] = static_cast<T>(0.0f);
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
    write_elements(direction, m, m.out, first, end, step, found);
  }
}

}  // namespace mica::kernels::softmax_rows
