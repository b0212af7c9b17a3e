#pragma once

// Code shared by the matrix products for compute capability 9.0. The kernel is persistent: a thread block computes one
// tile of the output after the other.
//
//     producer (a thread of warpgroup 0)     global memory ── TMA ──▶ stage 0 | stage 1 | … in shared memory, a ring
//     consumers (warpgroups 1 and 2)         stages ── wgmma ──▶ accumulators ── epilogue ──▶ global memory
//
// A stage holds a piece of a and a piece of b: kDepth elements of K for all rows or columns of the tile. Two or four
// blocks can form a cluster. Its blocks whose tiles are vertically adjacent need the same piece of b; each loads a part
// of it into the shared memory of all of them (multicast). Horizontally adjacent blocks share the piece of a likewise.

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ring.cuh>
#include <mica/core/cuda/tensor_copy.cuh>
#include <mica/core/cuda/wgmma.cuh>
#include <mica/ops/tiled_matmul/detail/tiled_matmul_cuda.cuh>

namespace mica::kernels::tiles {

using cuda::Ring;

inline constexpr int kTileRows = 128;
inline constexpr int kDepth = 64;  // elements of K in a piece: 128 bytes, the length of a swizzled line
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kLineBytes = 128;
inline constexpr int kChunk = 64;                        // elements of a line
inline constexpr int kChunkBytes = kChunk * kLineBytes;  // 64 lines
inline constexpr int kGroupRows = 1024;                  // rows of the output in a group of tiles (TileOrder)

template <int kTileColumns, int kStages_, int kClusterRows_, int kClusterColumns_ = 1>
struct Plan {
  static constexpr int kColumns = kTileColumns;
  static constexpr int kStages = kStages_;  // pieces being loaded or multiplied
  static constexpr int kClusterRows = kClusterRows_;
  static constexpr int kClusterColumns = kClusterColumns_;
  static constexpr int kCluster = kClusterRows * kClusterColumns;  // blocks
  static constexpr int kABytes = kTileRows * kLineBytes;
  static constexpr int kBBytes = kColumns * kLineBytes;
  static constexpr int kAShare = kTileRows / kClusterColumns;            // rows of a that a block loads
  static constexpr int kBShare = kColumns / kClusterRows;                // columns of b that it loads
  static constexpr int kNeighbors = kClusterRows + kClusterColumns - 1;  // blocks in its row and column, including it
  static constexpr std::uint16_t kRowMask = (1 << kClusterColumns) - 1;  // the blocks of the cluster's first row
  static constexpr std::uint16_t kColumnMask =                           // the blocks of the cluster's first column
      kClusterRows == 1      ? 1
      : kClusterColumns == 1 ? (1 << kClusterRows) - 1
                             : 0b0101;
  static_assert(kClusterColumns == 1 || (kClusterColumns == 2 && kClusterRows <= 2));
};

template <class P>
struct Stages {
  unsigned char a[P::kStages][P::kABytes];
  unsigned char b[P::kStages][P::kBBytes];
  std::uint64_t full[P::kStages];   // barriers: the stage's pieces have been loaded
  std::uint64_t empty[P::kStages];  // barriers: all consumers that read the stage's pieces have read them
};

struct Sizes {
  TileOrder order;  // of the clusters' tiles, each of which has a tile for every block
  int pieces;       // number of pieces that K is cut into
  int columns;      // N
};

template <class P>
Sizes sizes_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.order = {.rows = parts_of(m, P::kClusterRows * kTileRows),
                    .columns = parts_of(n, P::kClusterColumns * P::kColumns),
                    .group = kGroupRows / (P::kClusterRows * kTileRows)},
          .pieces = parts_of(k, kDepth),
          .columns = static_cast<int>(n)};
}

/// The tensor map (TMA descriptor) of a matrix, for boxes of `box_lines` lines.
inline CUtensorMap map_of(const Tensor& x, const Matrix& lines, int box_lines) {
  return cuda::swizzled_tensor_map({.dtype = x.dtype(),
                                    .data = x.raw_data(),
                                    .lines = lines.lines,
                                    .length = lines.length,
                                    .leading = lines.leading,
                                    .box_lines = static_cast<std::uint32_t>(box_lines),
                                    .box_length = kChunk});
}
template <class P, Lines kA>
CUtensorMap map_of_a(const Tensor& a) {
  return map_of(a, matrix_of(a), kA == Lines::depth ? P::kAShare : kDepth);
}
template <class P, Lines kB>
CUtensorMap map_of_b(const Tensor& b) {
  return map_of(b, matrix_of(b), kB == Lines::depth ? P::kBShare : kDepth);
}

/// The number of blocks to launch.
template <class P>
int blocks_for(const Sizes& sizes) {
  return std::min(sizes.order.size(), cuda::multiprocessor_count() / P::kCluster) * P::kCluster;
}

/// Initializes the barriers. `readers` is the number of warpgroups per block that read each stage.
template <class P>
__device__ void init_stages(Stages<P>& stages, int readers) {
  for (int stage = 0; stage < P::kStages; ++stage) {
    cuda::init_barrier(&stages.full[stage], 1);
    cuda::init_barrier(&stages.empty[stage], P::kNeighbors * readers);
  }
}

/// The block's rank in its cluster.
template <class P>
__device__ int rank_of_block() {
  return P::kCluster > 1 ? cuda::cluster_rank() : 0;
}

/// The first row and column of a tile.
struct Corner {
  int row;
  int column;
};

/// The corner of this block's tile, if the cluster processes item `number` of the order.
template <class P>
__device__ Corner corner_of(const Sizes& sizes, int number) {
  const TileOrder::Place place = sizes.order.place(number);
  const int rank = rank_of_block<P>();
  return {(place.row * P::kClusterRows + rank / P::kClusterColumns) * kTileRows,
          (place.column * P::kClusterColumns + rank % P::kClusterColumns) * P::kColumns};
}

/// Copies a box into the shared memory of all blocks in the mask `blocks` (multicast), or of this block if there is no
/// cluster.
template <class P>
__device__ void load_shared(void* to, const CUtensorMap* map, int element, int line, std::uint64_t* barrier,
                            std::uint16_t blocks) {
  if constexpr (P::kCluster > 1) {
    cuda::load_tile(to, map, element, line, barrier, blocks);
  } else {
    cuda::load_tile(to, map, element, line, barrier);
  }
}

/// Loads this block's share of a piece of b: the columns from `column` on.
template <class P, Lines kB>
__device__ void load_share_of_b(unsigned char* to, const CUtensorMap* map, int k, int column, std::uint64_t* full,
                                std::uint16_t blocks) {
  if constexpr (kB == Lines::depth) {
    load_shared<P>(to, map, k, column, full, blocks);
  } else {
    for (int chunk = 0; chunk < P::kBShare / kChunk; ++chunk) {
      load_shared<P>(to + chunk * kChunkBytes, map, column + chunk * kChunk, k, full, blocks);
    }
  }
}

/// The producer's loop: loads all pieces of all tiles of this block, each as soon as its stage is empty. load_b(to, k,
/// corner, share, full, blocks) loads the share of b that begins at column `share` of the tile. Runs in one thread.
template <class P, Lines kA, class F>
__device__ void produce(Stages<P>& stages, const CUtensorMap* a_map, const Sizes& sizes, const F& load_b) {
  const int rank = rank_of_block<P>();
  const int row_in_cluster = rank / P::kClusterColumns;
  const int column_in_cluster = rank % P::kClusterColumns;
  const auto of_row = static_cast<std::uint16_t>(P::kRowMask << (row_in_cluster * P::kClusterColumns));
  const auto of_column = static_cast<std::uint16_t>(P::kColumnMask << column_in_cluster);
  const int share_of_a = column_in_cluster * P::kAShare;
  const int share_of_b = row_in_cluster * P::kBShare;
  Ring<P::kStages> ring;
  for (int number = blockIdx.x / P::kCluster; number < sizes.order.size(); number += gridDim.x / P::kCluster) {
    const Corner corner = corner_of<P>(sizes, number);
    const int row = corner.row + share_of_a;
    for (int piece = 0; piece < sizes.pieces; ++piece, ring.advance()) {
      const int k = piece * kDepth;
      std::uint64_t* const full = &stages.full[ring.stage];
      cuda::wait(&stages.empty[ring.stage], ring.parity ^ 1);  // returns immediately in the first round
      cuda::arrive_expecting(full, P::kABytes + P::kBBytes);
      unsigned char* const a = stages.a[ring.stage] + share_of_a * kLineBytes;
      if constexpr (kA == Lines::depth) {
        load_shared<P>(a, a_map, k, row, full, of_row);
      } else {
        for (int chunk = 0; chunk < P::kAShare / kChunk; ++chunk) {
          load_shared<P>(a + chunk * kChunkBytes, a_map, row + chunk * kChunk, k, full, of_row);
        }
      }
      load_b(stages.b[ring.stage] + share_of_b * kLineBytes, k, corner, share_of_b, full, of_column);
    }
  }
}
template <class P, Lines kA, Lines kB>
__device__ void produce(Stages<P>& stages, const CUtensorMap* a_map, const CUtensorMap* b_map, const Sizes& sizes) {
  produce<P, kA>(
      stages, a_map, sizes,
      [&](unsigned char* to, int k, const Corner& corner, int share, std::uint64_t* full, std::uint16_t blocks) {
        load_share_of_b<P, kB>(to, b_map, k, corner.column + share, full, blocks);
      });
}

/// The descriptor of an operand in one stage, for wgmma.
template <Lines kLines>
__device__ std::uint64_t descriptor(const void* tile) {
  if constexpr (kLines == Lines::depth) {
    return cuda::depth_lines(tile);
  } else {
    return cuda::row_lines<kDepth>(tile);
  }
}

/// Tells all blocks that write into this block's stage (by multicast) that this warpgroup has read it.
template <class P>
__device__ void release(Stages<P>& stages, int stage) {
  const int thread = threadIdx.x % kWarpgroup;
  if (thread < P::kNeighbors) {
    const int rank = rank_of_block<P>();
    const int row = rank / P::kClusterColumns;
    const int column = rank % P::kClusterColumns;
    const int other_row = thread - P::kClusterColumns;  // counted without this block's row
    const int block = thread < P::kClusterColumns
                          ? row * P::kClusterColumns + thread
                          : (other_row + (other_row >= row ? 1 : 0)) * P::kClusterColumns + column;
    cuda::arrive_in_block(&stages.empty[stage], block);
  }
}

/// A warpgroup multiplies all pieces of a tile, for kHalves times 64 rows; these begin at byte `first_row` of a stage's
/// piece of a. Calls release(stages, stage) when a stage has been read, and issued() after the last wgmma has been
/// issued, before waiting for it.
template <class T, class P, Lines kA, Lines kB, int kHalves, class F, class Release>
__device__ void multiply_tile(float (&sums)[kHalves][P::kColumns / 2], Stages<P>& stages, Ring<P::kStages>& ring,
                              int pieces, int first_row, const F& issued, const Release& release) {
  int last = 0;
  for (int piece = 0; piece < pieces; ++piece, ring.advance()) {
    cuda::wait(&stages.full[ring.stage], ring.parity);
    std::uint64_t a = descriptor<kA>(stages.a[ring.stage] + first_row);
    std::uint64_t b = descriptor<kB>(stages.b[ring.stage]);
    cuda::begin_products();
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        cuda::multiply_add<T, P::kColumns, kA, kB>(sums[half], a + half * (kChunkBytes / 16), b, piece > 0 || k > 0);
      }
      a += cuda::kNextDepth<kA>;
      b += cuda::kNextDepth<kB>;
    }
    cuda::commit_products();
    if (piece > 0) {
      cuda::wait_products<1>();
      release(stages, last);
    }
    last = ring.stage;
  }
  issued();
  cuda::wait_products<0>();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    cuda::pin(sums[half]);
  }
  release(stages, last);
}

}  // namespace mica::kernels::tiles
