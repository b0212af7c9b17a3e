#pragma once

// Code shared by flash_attention_sm90.cu and flash_attention_backward_sm90.cu. Kernels are persistent, with one thread
// block per multiprocessor. A block has one producer warpgroup, which issues TMA copies of tiles to shared memory, and
// consumer warpgroups, which multiply the tiles by wgmma, 64 rows each.
//
// A tile in shared memory consists of chunks. A chunk has 64 columns of all rows, in swizzled lines of 128 bytes.

#include <algorithm>
#include <cstdint>

#include <mica/core/cuda/detail/ring.cuh>
#include <mica/core/cuda/detail/tensor_copy.cuh>
#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/dispatch.h>
#include <mica/ops/attention/detail/flash_attention_cuda.cuh>

namespace mica::kernels::flash {

using cuda::Ring;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kConsumerRows = 64;
constexpr int kLineBytes = 128;
constexpr int kChunk = 64;  // elements of a line
constexpr int kConsumerChunkBytes = kConsumerRows * kLineBytes;
constexpr float kLn2 = 0.6931471805599453f;

/// Which tiles a thread block processes, and in which order. A tile is a part of the queries (or keys) of one head.
/// Tiles are sorted by descending work and assigned to blocks in units of one tile, or of two tiles paired so that all
/// pairs have equal work.
struct Order {
  int heads;           // of all batches
  int tiles;           // per head
  int units_of_head;   // units are ordered head by head; or 0: the first units of all heads, then the second ones, …
  bool paired;         // a unit is the tile with the most work and that with the least, and so on
  bool last_is_heavy;  // whether the last tile of a head has the most work, instead of the first

  struct HeadTile {
    int tile;
    int head;
  };

  /// Calls f(HeadTile) for each tile of this block. Blocks get units in alternating order (0, 1, 2, 2, 1, 0, …), so
  /// that none always gets the heavier ones.
  template <class F>
  __device__ void each(const F& f) const {
    const int grid = static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x);
    const int units = heads * (units_of_head > 0 ? units_of_head : tiles);
#pragma unroll 1
    for (int i = 0;; ++i) {  // i is the only state between tiles, to save registers
      const int round = paired ? i / 2 : i;
      const int unit = round * grid + (round % 2 == 0 ? block : grid - 1 - block);
      if (unit >= units) {
        return;
      }
      const int head = units_of_head > 0 ? unit / units_of_head : unit % heads;
      int rank = units_of_head > 0 ? unit % units_of_head : unit / heads;  // by work; 0 is the tile with the most
      if (paired && i % 2 == 1) {
        if (rank == tiles - 1 - rank) {
          continue;
        }
        rank = tiles - 1 - rank;
      }
      f(HeadTile{last_is_heavy ? tiles - 1 - rank : rank, head});
    }
  }
};

/// Each tile of a head reads `read_bytes`: the head's keys and values, for example. If those of all heads fit into the
/// L2 cache, the longest tiles of all heads come first, so that multiprocessors end together. Otherwise one head
/// follows the other, except where the softmax takes longer than the products.
inline Order order_of(const Work& work, int heads, int tiles, bool last_is_heavy, int grid, double read_bytes) {
  constexpr double kCache = 24e6;
  constexpr int kRounds = 2;  // the minimum of units per block
  const bool causal = work.offset < work.keys;
  const int units = causal ? (tiles + 1) / 2 : tiles;
  const bool by_heads = heads * read_bytes > kCache && std::int64_t{heads} * units >= std::int64_t{kRounds} * grid &&
                        (!causal || work.depth > 64);
  return {.heads = heads,
          .tiles = tiles,
          .units_of_head = by_heads ? units : 0,
          .paired = by_heads && causal,
          .last_is_heavy = last_is_heavy};
}

/// Launches kernel(work, maps, order) with one block per multiprocessor, or per tile if there are fewer. `dependent`: a
/// programmatic dependent launch, for kernels that wait for the previous one themselves.
template <class Maps>
void launch_persistent(void (*kernel)(Work, Maps, Order), const char* name, int threads, int shared_bytes, int heads,
                       int tiles, bool last_is_heavy, double read_bytes, const Work& work, const Maps& maps,
                       bool dependent = false) {
  const std::int64_t all = std::int64_t{heads} * tiles;
  check(all < std::int64_t{1} << 30, "attention: {} tiles of {} heads are too many", tiles, heads);
  const int grid = static_cast<int>(std::min<std::int64_t>(all, cuda::multiprocessor_count()));
  cuda::Launch launch(dim3(grid), dim3(threads), shared_bytes);
  if (dependent) {
    launch.dependent();
  }
  launch.run(kernel, name, work, maps, order_of(work, heads, tiles, last_is_heavy, grid, read_bytes));
}

inline cuda::HeadsMapArgs heads_map_args(const Work& work, const Operand& x, int heads, int rows, int box_lines) {
  return {.dtype = work.dtype,
          .data = x.data,
          .sizes = {work.batches, heads, rows, work.depth},
          .strides = {x.batch, x.head, x.row},
          .box_lines = static_cast<std::uint32_t>(box_lines)};
}
inline CUtensorMap map_of_queries(const Work& work, const Operand& x, int box_lines) {
  return cuda::swizzled_heads_map(heads_map_args(work, x, work.heads, work.queries, box_lines));
}
inline CUtensorMap map_of_keys(const Work& work, const Operand& x, int box_lines) {
  return cuda::swizzled_heads_map(heads_map_args(work, x, work.heads / work.group, work.keys, box_lines));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// The number of this thread's consumer warpgroup. The shuffle tells the compiler that it is the same in the whole
/// warp, since it would serialize wgmma in divergent code.
__device__ inline int consumer_of_thread() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
}

/// Loads the chunks of a tile of kRows rows into shared memory.
template <int kChunks, int kRows>
__device__ void load_chunks(unsigned char* to, const CUtensorMap* map, int row, int head, int batch,
                            std::uint64_t* barrier) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    cuda::load_tile(to + chunk * kRows * kLineBytes, map, chunk * kChunk, row, head, batch, barrier);
  }
}

/// sums (64, kRows) = a (64, 64 · kChunks) · b (kRows, 64 · kChunks)ᵀ, both tiles of chunks in shared memory.
template <class T, int kChunks, int kRows>
__device__ void multiply_transposed(float (&sums)[kRows / 2], const unsigned char* a, const unsigned char* b) {
  constexpr std::uint64_t kNext = cuda::kNextDepth<cuda::Lines::depth>;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const std::uint64_t a_chunk = cuda::depth_lines(a + chunk * kConsumerChunkBytes);
    const std::uint64_t b_chunk = cuda::depth_lines(b + chunk * kRows * kLineBytes);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      cuda::multiply_add<T, kRows, cuda::Lines::depth, cuda::Lines::depth>(sums, a_chunk + k * kNext,
                                                                           b_chunk + k * kNext, chunk > 0 || k > 0);
    }
  }
}

/// sums (64, 64 · kChunks) += weights (64, kRows) · b (kRows, 64 · kChunks), the weights in registers.
template <class T, int kChunks, int kRows>
__device__ void add_product(float (&sums)[kChunks * kChunk / 2], const std::uint32_t (&weights)[kRows / 16][4],
                            const unsigned char* b) {
  const std::uint64_t first = cuda::row_lines<kRows>(b);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    cuda::multiply_add<T, kChunks * kChunk, cuda::Lines::rows>(sums, weights[k],
                                                               first + k * cuda::kNextDepth<cuda::Lines::rows>);
  }
}

/// Rounds a product's accumulators to T, as the left operand of another product.
template <class T, int kRows>
__device__ void round_to(std::uint32_t (&weights)[kRows / 16][4], const float (&sums)[kRows / 2]) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[k][i] = cuda::pair_of<T>(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
    }
  }
}

template <int kCount>
__device__ void copy_fragments(std::uint32_t (&to)[kCount][4], const std::uint32_t (&from)[kCount][4]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[k][i] = from[k][i];
    }
  }
}

template <int kCount>
__device__ void pin_all(std::uint32_t (&fragments)[kCount][4]) {
#pragma unroll
  for (auto& fragment : fragments) {
    cuda::pin(fragment);
  }
}

/// Writes a warpgroup's 64 rows, times lane l's factors for rows l / 4 and l / 4 + 8 of its warp, through a tile in
/// shared memory, from which TMA writes the rows that exist. Thread 0 waits until the tile can be reused.
template <class T, int kChunks>
__device__ void write_rows(const float (&sums)[kChunks * kChunk / 2], float first_factor, float second_factor,
                           unsigned char* tile, const CUtensorMap* map, int row, int head, int batch, int barrier) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarp;
  const int line = thread / kWarp * 16 + lane % 16;  // the line whose address this lane passes to stmatrix
  cuda::barrier_sync(barrier, kWarpgroup);           // until all threads have finished reading the tile
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const float* const s = sums + chunk * (kChunk / 2) + i * 8;
      std::uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float factor = j % 2 == 0 ? first_factor : second_factor;
        pairs[j] = cuda::pair_of<T>(s[2 * j] * factor, s[2 * j + 1] * factor);
      }
      const int position = (2 * i + lane / 16) ^ (line % 8);  // the swizzle of the tensor map
      cuda::store_matrices(tile + chunk * kConsumerChunkBytes + line * kLineBytes + position * 16, pairs);
    }
  }
  cuda::fence_async_proxy();
  cuda::barrier_sync(barrier, kWarpgroup);
  if (thread == 0) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      cuda::store_tile(map, chunk * kChunk, row, head, batch, tile + chunk * kConsumerChunkBytes);
    }
    cuda::commit_stores();
    cuda::wait_stores_read<0>();
  }
}

#endif

}  // namespace mica::kernels::flash
