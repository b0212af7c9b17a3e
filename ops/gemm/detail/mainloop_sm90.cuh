#pragma once

// The loop of a matrix product on compute capability 9.0. One thread loads slices of the operands into a ring of stages
// in shared memory, two warpgroups multiply them:
//
//     producer (a thread of warpgroup 0)     global memory ── TMA ──▶ stage 0 | stage 1 | … in shared memory, a ring
//     consumers (warpgroups 1 and 2)         stages ── wgmma ──▶ accumulators ──▶ epilogue (kernel_sm90.cuh)
//
// A stage has a slice of a and a slice of b: kDepth elements of K for all rows or columns of the tile. In a cluster of
// two or four blocks, those with vertically adjacent tiles need the same slice of b, and each loads a part of it into
// the shared memory of all of them (multicast). Horizontally adjacent blocks do the same with the slice of a.

#include <algorithm>
#include <cstdint>

#include <mica/core/cuda/detail/ring.cuh>
#include <mica/core/cuda/detail/tensor_copy.cuh>
#include <mica/core/cuda/detail/wgmma.cuh>
#include <mica/core/cuda/device.h>
#include <mica/core/detail/ceil_div.h>
#include <mica/ops/gemm/detail/operand_layout.h>
#include <mica/ops/gemm/detail/tile_order.cuh>

namespace mica::gemm {

using cuda::Lines;
using cuda::Ring;

inline constexpr int kTileRows = 128;
inline constexpr int kDepth = 64;     // elements of K in a slice: 128 bytes, the length of a swizzled line
inline constexpr int kHalfRows = 64;  // rows of a wgmma instruction: half of a tile's
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kLineBytes = 128;
inline constexpr int kChunk = 64;                        // elements of a line
inline constexpr int kChunkBytes = kChunk * kLineBytes;  // 64 lines
inline constexpr int kGroupRows = 1024;                  // rows of the output in a group of tiles (TileOrder)

/// The size of a tile, of the ring and of the cluster.
template <int kTileColumns, int kStages_, int kClusterRows_, int kClusterColumns_ = 1>
struct TilePlan {
  static constexpr int kColumns = kTileColumns;
  static constexpr int kStages = kStages_;  // slices being loaded or multiplied
  static constexpr int kClusterRows = kClusterRows_;
  static constexpr int kClusterColumns = kClusterColumns_;
  static constexpr int kCluster = kClusterRows * kClusterColumns;  // blocks
  static constexpr int kABytes = kTileRows * kLineBytes;
  static constexpr int kBBytes = kColumns * kLineBytes;
  static constexpr int kARows = kTileRows / kClusterColumns;             // rows of a that a block loads
  static constexpr int kBColumns = kColumns / kClusterRows;              // columns of b that it loads
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
  std::uint64_t full[P::kStages];   // barriers: the stage's slices have been loaded
  std::uint64_t empty[P::kStages];  // barriers: all consumers that read the stage's slices have read them
};

struct Sizes {
  TileOrder order;  // of the clusters' tiles, each of which has a tile for every block
  int slices;       // of K
};

template <class P>
Sizes sizes_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.order = {.rows = static_cast<int>(ceil_div(m, P::kClusterRows * kTileRows)),
                    .columns = static_cast<int>(ceil_div(n, P::kClusterColumns * P::kColumns)),
                    .group = kGroupRows / (P::kClusterRows * kTileRows)},
          .slices = static_cast<int>(ceil_div(k, kDepth))};
}

/// Whether the copy engine can read or write x.
inline bool fits_tensor_map(const Tensor& x) {
  const OperandLayout m = layout_of(x);
  return m.step == 1 && m.leading >= m.length &&
         cuda::fits_tensor_map(x.dtype(), x.raw_data(), m.lines, m.length, m.leading);
}

/// The tensor map (TMA descriptor) of a matrix, for boxes of `box_lines` lines and kChunk elements.
inline CUtensorMap map_of(const Tensor& x, int box_lines) {
  const OperandLayout m = layout_of(x);
  return cuda::swizzled_tensor_map({.dtype = x.dtype(),
                                    .data = x.raw_data(),
                                    .lines = m.lines,
                                    .length = m.length,
                                    .leading = m.leading,
                                    .box_lines = static_cast<std::uint32_t>(box_lines),
                                    .box_length = kChunk});
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
  const TileOrder::Position position = sizes.order.position(number);
  const int rank = rank_of_block<P>();
  return {(position.row * P::kClusterRows + rank / P::kClusterColumns) * kTileRows,
          (position.column * P::kClusterColumns + rank % P::kClusterColumns) * P::kColumns};
}

/// Copies a box into the shared memory of all blocks in the mask `blocks` (multicast), or of this block if there is no
/// cluster.
template <class P>
__device__ void load_box(void* to, const CUtensorMap* map, int element, int line, std::uint64_t* barrier,
                         std::uint16_t blocks) {
  if constexpr (P::kCluster > 1) {
    cuda::load_tile(to, map, element, line, barrier, blocks);
  } else {
    cuda::load_tile(to, map, element, line, barrier);
  }
}

/// Loads kRows rows of a (columns of b) of a slice, from `row` and `k` on.
template <class P, Lines kLines, int kRows>
__device__ void load_slice(unsigned char* to, const CUtensorMap* map, int k, int row, std::uint64_t* full,
                           std::uint16_t blocks) {
  if constexpr (kLines == Lines::depth) {
    load_box<P>(to, map, k, row, full, blocks);
  } else {
    for (int chunk = 0; chunk < kRows / kChunk; ++chunk) {
      load_box<P>(to + chunk * kChunkBytes, map, row + chunk * kChunk, k, full, blocks);
    }
  }
}

/// Two matrices, each with lines along K or along the rows of a and the columns of b.
template <class P, Lines kA_, Lines kB_>
struct MatrixOperands {
  static constexpr Lines kA = kA_;
  static constexpr Lines kB = kB_;
  static constexpr bool kIsDependent = false;
  CUtensorMap a;
  CUtensorMap b;

  MatrixOperands(const Tensor& a_matrix, const Tensor& b_matrix)
      : a(map_of(a_matrix, kA == Lines::depth ? P::kARows : kDepth)),
        b(map_of(b_matrix, kB == Lines::depth ? P::kBColumns : kDepth)) {}

  __device__ void load_a(unsigned char* to, int k, int row, std::uint64_t* full, std::uint16_t blocks) const {
    load_slice<P, kA, P::kARows>(to, &a, k, row, full, blocks);
  }
  __device__ void load_b(unsigned char* to, int k, int column, std::uint64_t* full, std::uint16_t blocks) const {
    load_slice<P, kB, P::kBColumns>(to, &b, k, column, full, blocks);
  }
};

/// The producer's loop, which runs in one thread: loads all slices of all tiles of this block, each as soon as its
/// stage is empty. In a dependent launch, it loads the first slices of b before the previous kernel ends.
template <class P, class Operands>
__device__ void produce(Stages<P>& stages, const Operands& operands, const Sizes& sizes) {
  const int rank = rank_of_block<P>();
  const int row_in_cluster = rank / P::kClusterColumns;
  const int column_in_cluster = rank % P::kClusterColumns;
  const auto blocks_of_row = static_cast<std::uint16_t>(P::kRowMask << (row_in_cluster * P::kClusterColumns));
  const auto blocks_of_column = static_cast<std::uint16_t>(P::kColumnMask << column_in_cluster);
  const int first_row = column_in_cluster * P::kARows;
  const int first_column = row_in_cluster * P::kBColumns;
  const auto expect = [&](int stage) { cuda::arrive_expecting(&stages.full[stage], P::kABytes + P::kBBytes); };
  const auto load_a = [&](int stage, int slice, const Corner& corner) {
    operands.load_a(stages.a[stage] + first_row * kLineBytes, slice * kDepth, corner.row + first_row,
                    &stages.full[stage], blocks_of_row);
  };
  const auto load_b = [&](int stage, int slice, const Corner& corner) {
    operands.load_b(stages.b[stage] + first_column * kLineBytes, slice * kDepth, corner.column + first_column,
                    &stages.full[stage], blocks_of_column);
  };
  Ring<P::kStages> ring;
  int slice = 0;
  if constexpr (Operands::kIsDependent) {
    static_assert(P::kCluster == 1);
    const int early = min(sizes.slices, P::kStages);
    const Corner first = corner_of<P>(sizes, static_cast<int>(blockIdx.x));
    for (; slice < early; ++slice) {
      expect(slice);
      load_b(slice, slice, first);
    }
    cuda::wait_for_previous_kernel();
    for (int stage = 0; stage < early; ++stage) {
      load_a(stage, stage, first);
    }
    ring.skip(early);
  }
  const int step = static_cast<int>(gridDim.x) / P::kCluster;
  for (int number = static_cast<int>(blockIdx.x) / P::kCluster; number < sizes.order.size();
       number += step, slice = 0) {
    const Corner corner = corner_of<P>(sizes, number);
    for (; slice < sizes.slices; ++slice, ring.advance()) {
      cuda::wait(&stages.empty[ring.stage], ring.parity ^ 1);  // returns immediately in the first round
      expect(ring.stage);
      load_a(ring.stage, slice, corner);
      load_b(ring.stage, slice, corner);
    }
  }
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
  if (thread >= P::kNeighbors) {
    return;
  }
  if constexpr (P::kCluster == 1) {
    cuda::arrive(&stages.empty[stage]);
  } else {
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

/// Multiplies all slices of a tile by one warpgroup, for kHalves times 64 rows from line `first_line` of a's slices on.
/// Calls issued() after the last wgmma has been issued, before waiting for it.
template <class T, class P, Lines kA, Lines kB, int kHalves, class F>
__device__ void multiply_tile(float (&sums)[kHalves][P::kColumns / 2], Stages<P>& stages, Ring<P::kStages>& ring,
                              int slices, int first_line, const F& issued) {
  int last = 0;
  for (int slice = 0; slice < slices; ++slice, ring.advance()) {
    cuda::wait(&stages.full[ring.stage], ring.parity);
    std::uint64_t a = descriptor<kA>(stages.a[ring.stage] + first_line * kLineBytes);
    std::uint64_t b = descriptor<kB>(stages.b[ring.stage]);
    cuda::begin_products();
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        cuda::multiply_add<T, P::kColumns, kA, kB>(sums[half], a + half * (kChunkBytes / 16), b, slice > 0 || k > 0);
      }
      a += cuda::kNextDepth<kA>;
      b += cuda::kNextDepth<kB>;
    }
    cuda::commit_products();
    if (slice > 0) {
      cuda::wait_products<1>();
      release<P>(stages, last);
    }
    last = ring.stage;
  }
  issued();
  cuda::wait_products<0>();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    cuda::pin(sums[half]);
  }
  release<P>(stages, last);
}

}  // namespace mica::gemm
