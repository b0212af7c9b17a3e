#pragma once

// What threads do together over one row-major row on CUDA. Included by *_cuda.cu only.
//
// A row belongs to a team: a warp where it is short, else a block. Which thread takes which elements, and in which
// order the threads' sums are joined, depends on the length of the row alone.

#include <cstdint>
#include <limits>

#include <mica/core/dtype.h>
#include <mica/core/math.h>
#include <mica/ops/reduce/detail/pack.cuh>

namespace mica::kernels {

inline constexpr int kWarp = 32;
inline constexpr std::int64_t kWarpRow = 1024;  // the longest row that a warp takes
inline constexpr int kWarpTeams = 8;            // of a block

/// Threads of the block that takes a row of n elements.
inline int row_threads(std::int64_t n) { return n <= 4096 ? 256 : n <= 16384 ? 512 : 1024; }

/// The largest of what was added so far, and the sum of exp(x - largest), kept true as the largest grows.
template <class V>
struct OnlineSumExp {
  V largest;
  V sum;

  // Not member initializers: these also stand in shared memory, which cannot be initialized.
  __device__ static OnlineSumExp nothing() { return {-std::numeric_limits<V>::infinity(), V{0}}; }

  __device__ void add(V x) {
    if (x > largest) {
      sum = sum * math::exp(largest - x) + V{1};
      largest = x;
    } else if (x != -std::numeric_limits<V>::infinity()) {  // also where x is NaN, which the sum then becomes
      sum += math::exp(x - largest);
    }
  }
  __device__ void join(const OnlineSumExp& other) {
    const V top = other.largest > largest ? other.largest : largest;
    // Where nothing finite has been seen, the sum is 0 (or NaN) whatever it is scaled by.
    const bool empty = top == -std::numeric_limits<V>::infinity();
    const V mine = empty ? V{1} : math::exp(largest - top);
    const V others = empty ? V{1} : math::exp(other.largest - top);
    sum = sum * mine + other.sum * others;
    largest = top;
  }
  /// The sum, where all has been added: NaN where infinity minus infinity is in it.
  __device__ V total() const {
    return largest == std::numeric_limits<V>::infinity() ? std::numeric_limits<V>::quiet_NaN() : sum;
  }
  __device__ OnlineSumExp shuffled(int mask) const {
    return {__shfl_xor_sync(0xffffffffu, largest, mask), __shfl_xor_sync(0xffffffffu, sum, mask)};
  }
};

template <class V>
struct PlainSum {
  V sum;

  __device__ static PlainSum nothing() { return {V{0}}; }
  __device__ void add(V x) { sum += x; }
  __device__ void join(const PlainSum& other) { sum += other.sum; }
  __device__ PlainSum shuffled(int mask) const { return {__shfl_xor_sync(0xffffffffu, sum, mask)}; }
};

/// What `lanes` neighboring lanes, a power of two, have found, in each of them.
///
/// With a butterfly, both partners of an exchange join in the order of their lanes, so that all get the same bits.
template <class Found>
__device__ Found joined_lanes(Found own, int lane, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) {
    Found other = own.shuffled(mask);
    if (lane & mask) {
      other.join(own);
      own = other;
    } else {
      own.join(other);
    }
  }
  return own;
}

/// What all threads of the team have found, in each of them. Every thread of the block must come here.
template <bool kBlock, class Found>
__device__ Found joined(Found found) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  found = joined_lanes(found, lane, kWarp);
  if constexpr (kBlock) {
    __shared__ Found warps[kWarp];
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int count = static_cast<int>(blockDim.x) / kWarp;  // a power of two
    __syncthreads();                                         // until the last row's have been read
    if (lane == 0) {
      warps[warp] = found;
    }
    __syncthreads();
    found = joined_lanes(warps[lane & (count - 1)], lane, count);
  }
  return found;
}

/// Calls pack(i) for the first elements i of the packs of a row that are thread t's, then single(i) for those elements
/// of the tail that are.
template <class T, class PackFn, class SingleFn>
__device__ void for_row(std::int64_t n, int t, int threads, const PackFn& pack, const SingleFn& single) {
  constexpr int kPack = Pack<T>::kSize;
  const std::int64_t packed = n / kPack * kPack;
  for (std::int64_t i = static_cast<std::int64_t>(t) * kPack; i < packed;
       i += static_cast<std::int64_t>(threads) * kPack) {
    pack(i);
  }
  for (std::int64_t i = packed + t; i < n; i += threads) {
    single(i);
  }
}

/// What thread t finds in a row.
template <class Found, class T>
__device__ Found found_in_row(const T* x, std::int64_t n, int t, int threads) {
  using V = Accumulate<T>;
  Found found = Found::nothing();
  const bool aligned = is_aligned(x);
  for_row<T>(
      n, t, threads,
      [&](std::int64_t i) {
        const Pack<T> pack = load_pack(x + i, aligned);
#pragma unroll
        for (int j = 0; j < Pack<T>::kSize; ++j) {
          found.add(static_cast<V>(pack.values[j]));
        }
      },
      [&](std::int64_t i) { found.add(static_cast<V>(x[i])); });
  return found;
}

/// y[i] = f(x[i], i) over a row.
template <class T, class F>
__device__ void map_row(const T* x, T* y, std::int64_t n, int t, int threads, const F& f) {
  using V = Accumulate<T>;
  const bool aligned = is_aligned(x);
  const bool aligned_out = is_aligned(y);
  for_row<T>(
      n, t, threads,
      [&](std::int64_t i) {
        const Pack<T> pack = load_pack(x + i, aligned);
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < Pack<T>::kSize; ++j) {
          out.values[j] = static_cast<T>(f(static_cast<V>(pack.values[j]), i + j));
        }
        store_pack(y + i, out, aligned_out);
      },
      [&](std::int64_t i) { y[i] = static_cast<T>(f(static_cast<V>(x[i]), i)); });
}

/// Blocks for `rows` rows: kernels go on to further rows with a stride of the grid.
inline unsigned row_blocks(std::int64_t rows, bool block_each) {
  const std::int64_t blocks = block_each ? rows : (rows + kWarpTeams - 1) / kWarpTeams;
  return static_cast<unsigned>(blocks < (1 << 30) ? blocks : (1 << 30));
}

/// The team of this thread: which row it starts with, by how many it goes on, and the thread's place in it.
template <bool kBlock>
struct Team {
  std::int64_t first;
  std::int64_t step;
  int t;
  int threads;

  __device__ Team() {
    if constexpr (kBlock) {
      first = blockIdx.x;
      step = gridDim.x;
      t = static_cast<int>(threadIdx.x);
      threads = static_cast<int>(blockDim.x);
    } else {
      first = static_cast<std::int64_t>(blockIdx.x) * kWarpTeams + threadIdx.x / kWarp;
      step = static_cast<std::int64_t>(gridDim.x) * kWarpTeams;
      t = static_cast<int>(threadIdx.x) % kWarp;
      threads = kWarp;
    }
  }
};

}  // namespace mica::kernels
