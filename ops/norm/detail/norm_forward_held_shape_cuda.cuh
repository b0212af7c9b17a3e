#pragma once

// The template arguments of the kernel for held rows, the rows that a team has, and the columns that a thread has.

#include <algorithm>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/detail/row_team_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

namespace mica::kernels::norm_cuda {

// The blocks of a grid:
// - many: each team has one row;
// - few: the same, and all blocks can run at once;
// - stay: blocks are persistent, and each team has one row after another;
// - stay_with_edges: the same for unaligned rows, which begin and end inside packs. All rows of a block begin at the
//   same place in a pack, since their numbers differ by multiples of V.
enum class Blocks { many, few, stay, stay_with_edges };

// Where weight and bias are read from when y is computed.
enum class ParametersIn { memory, shared, registers };

// The template arguments of a kernel, and constants that follow from them. A thread has P packs of V columns. The packs
// of kLanes neighboring lanes are adjacent.
template <class N_, class T_, class W_, RowTeam kTeam_, int kLanes_, int V_, int P_, Blocks kBlocks_>
struct HeldShape {
  using N = N_;
  using T = T_;
  using W = W_;
  using S = Accumulate<T>;
  static constexpr RowTeam kTeam = kTeam_;
  static constexpr int kLanes = kLanes_;
  static constexpr int V = V_;
  static constexpr int P = P_;
  static constexpr bool kEdges = kBlocks_ == Blocks::stay_with_edges;
  static constexpr bool kStays = kBlocks_ == Blocks::stay || kEdges;
  static constexpr bool kFew = kBlocks_ == Blocks::few;
  static constexpr bool kAdds = N::kSource != Source::x;
  static constexpr int kStep = kLanes * V;                            // columns from one pack of a thread to the next
  static constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row, per thread

  // Whether the parameters are in shared memory: blocks are persistent, and the parameters are float32 and x has 16
  // bits, or a thread's columns are not aligned, or rows are aligned and shared by a cluster. Blocks that do not form
  // clusters then compute several rows at once, even if several warps share each row.
  static constexpr bool kShares =
      kEdges || (kStays && V >= 4 && (kTeam == RowTeam::cluster || (N::kCentered && sizeof(T) == 2 && sizeof(W) == 4)));
  // Whether several warps share a row.
  static constexpr bool kWarps = kTeam == RowTeam::block || kTeam == RowTeam::cluster;

  // With few blocks, there are enough registers to load the parameters before the moments are known, while x is in
  // flight. The clusters that compute unaligned rows keep them in registers, too.
  static constexpr ParametersIn kParameters = kShares                     ? ParametersIn::shared
                                              : kFew || (kStays && V < 4) ? ParametersIn::registers
                                                                          : ParametersIn::memory;

  // The most threads per block.
  static constexpr int kMostThreads = [] {
    if (!kWarps) {
      return kForwardBlock / 2;
    }
    if (kTeam == RowTeam::cluster) {
      return kEdges ? kEdgesBlock : kForwardBlock;
    }
    return kShares && !(kEdges && kBytes >= 64) ? kSharingBlock : kForwardBlock;
  }();

  // How many blocks of kMostThreads threads must fit on a multiprocessor (__launch_bounds__): as many as possible
  // without spilling registers.
  static constexpr int kLeastBlocks = [] {
    if (sizeof(T) == 8) {
      return 1;
    }
    if (kFew) {
      return kForwardBlock / kMostThreads;
    }
    if (kAdds) {
      return kTeam == RowTeam::block ? 2 : kBytes <= 32 ? 4 : 3;
    }
    if (kTeam == RowTeam::cluster) {
      const bool many_parameters = N::kCentered && P == 4 && sizeof(W) == 4;
      return V < 4 || kBytes > 64 || many_parameters ? 1 : 2;
    }
    if (V == 1) {
      return sizeof(T) == 2 && !N::kCentered ? 3 : 2;
    }
    if (kTeam == RowTeam::block) {
      return kShares ? 1 : !kStays && sizeof(T) == 2 ? 3 : 2;
    }
    if (kStays) {
      return kBytes <= 48 ? 4 : 3;
    }
    return sizeof(T) == 4 ? 6 : 4;
  }();

  // Whether x is always loaded with the L2 cache policy evict_last, and not only if y is large. Without it, a warp's
  // 16-bit rows of RMS norms are faster.
  static constexpr bool kKeepsInL2 = N::kCentered || kWarps || sizeof(T) != 2;
};

// The columns that a thread has of a row. They are counted from the beginning of the row's first pack.
template <class H>
struct Place {
  static constexpr int V = H::V;
  static constexpr int P = H::P;

  int phase = 0;       // with edges: elements of the first pack that are before the row
  int rank = 0;        // the block's, in its cluster
  int slab = 0;        // the block's first column
  int first;           // the thread's first column
  int columns;         // where the row, or the block's slab of it, ends; 0 if the thread has no row
  bool edges = false;  // whether the row begins or ends inside a pack of the warp

  __device__ Place(const NormForwardPlan& p, int row_columns, int lane, int row_phase)
      : Place(p, row_columns, lane, row_phase, false) {
    if constexpr (H::kEdges) {
      const bool own = first_of(0) > 0 || (columns % V > 0 && first < columns && (columns - first) % H::kStep < V);
      edges = __any_sync(kAllLanes, own);
    }
  }
  __device__ Place(const NormForwardPlan& p, int row_columns, int lane, int row_phase, bool has_edges)
      : phase(row_phase),
        first((lane / H::kLanes * (P * H::kLanes) + lane % H::kLanes) * V),
        columns(row_columns + row_phase),
        edges(has_edges) {
    if constexpr (H::kTeam == RowTeam::cluster) {
      rank = cuda::cluster_rank();
      slab = rank * p.slab;
      first += slab;
      columns = max(slab, min(columns, slab + p.slab));
    }
  }

  /// The same, computed again except for `edges`: registers that hold it from row to row would be spilled.
  __device__ Place again(const NormForwardPlan& p, int row_columns) const {
    return Place(p, row_columns, held::opaque(static_cast<int>(threadIdx.x)), phase, edges);
  }

  __device__ bool has(int i) const { return first + i * H::kStep < columns; }

  /// Whether pack i is an edge: only its elements first_of(i) to end_of(i) − 1 are in the row.
  __device__ bool is_edge(int i) const { return first_of(i) > 0 || end_of(i) < V; }
  __device__ int first_of(int i) const { return i == 0 && first == 0 ? phase : 0; }
  __device__ int end_of(int i) const { return min(V, columns - first - i * H::kStep); }

  __device__ int packs() const { return (columns - first + H::kStep - 1) / H::kStep; }
  __device__ int elements() const { return V * max(0, min(P, packs())); }
};

// The rows of a team, from `first` on, `step` apart, before `end`. With edges, they all begin at the same place in a
// pack, after `phase` elements.
template <class H>
struct Run {
  // An int is enough if several warps share a row: the index of a block is an int.
  using Index = std::conditional_t<H::kWarps, int, std::int64_t>;

  Index first;
  Index step;
  Index end;
  int phase = 0;

  __device__ Run(const NormForwardPlan& p, std::int64_t rows, std::int64_t columns, int block)
      : first(block), step(static_cast<Index>(gridDim.x)), end(static_cast<Index>(rows)) {
    const int team = static_cast<int>(threadIdx.y);
    if constexpr (H::kTeam == RowTeam::cluster) {
      first /= p.blocks;
      step /= p.blocks;
    }
    if constexpr (H::kEdges) {
      phase = static_cast<int>(first % H::V) * static_cast<int>(columns % H::V) % H::V;
      first += team * step;
      step *= p.teams;
    } else if constexpr (H::kTeam != RowTeam::cluster && (H::kTeam != RowTeam::block || H::kShares)) {
      first = first * p.teams + team;
      step *= p.teams;
    }
  }
};

}  // namespace mica::kernels::norm_cuda
