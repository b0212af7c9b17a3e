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
// - stay_with_edges: the same for unaligned rows, which begin and end inside packs.
enum class Blocks { many, few, stay, stay_with_edges };

// Where weight and bias are read from when y is computed.
enum class ParametersIn { memory, shared, shared_by_column, registers };

// The template arguments of a kernel, and constants that follow from them. A thread has P packs of V columns. The packs
// of kLanes neighboring lanes are adjacent.
template <class N_, class T_, class W_, Team kTeam_, int kLanes_, int V_, int P_, Blocks kBlocks_>
struct HeldShape {
  using N = N_;
  using T = T_;
  using W = W_;
  using S = Accumulate<T>;
  static constexpr Team kTeam = kTeam_;
  static constexpr int kLanes = kLanes_;
  static constexpr int V = V_;
  static constexpr int P = P_;
  static constexpr bool kEdges = kBlocks_ == Blocks::stay_with_edges;
  static constexpr bool kStays = kBlocks_ == Blocks::stay || kEdges;
  static constexpr bool kFew = kBlocks_ == Blocks::few;
  static constexpr bool kAdds = N::kSource != Source::x;
  static constexpr int kStep = kLanes * V;                            // columns from one pack of a thread to the next
  static constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row, per thread

  // Whether the parameters are in shared memory. They are if rows have edges, and in persistent blocks with packs, if a
  // cluster shares each row or if they are float32 and x has 16 bits. Blocks that do not form clusters then compute
  // several rows at once, even if several warps share each row.
  static constexpr bool kShares =
      kEdges || (kStays && V >= 4 && (kTeam == Team::cluster || (N::kCentered && sizeof(T) == 2 && sizeof(W) == 4)));
  // Whether several warps share a row.
  static constexpr bool kWarps = kTeam == Team::block || kTeam == Team::cluster;

  // With few blocks, there are enough registers to load the parameters before the moments are known, while x is in
  // flight. Clusters that hold rows by words or single elements keep them in registers, too.
  static constexpr ParametersIn kParameters = kEdges                      ? ParametersIn::shared_by_column
                                              : kShares                   ? ParametersIn::shared
                                              : kFew || (kStays && V < 4) ? ParametersIn::registers
                                                                          : ParametersIn::memory;

  // The most threads per block.
  static constexpr int kMostThreads = [] {
    if (!kWarps) {
      return kForwardBlock / 2;
    }
    if (kTeam == Team::cluster) {
      return kForwardBlock;
    }
    return kShares ? kSharingBlock : kForwardBlock;
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
      return kTeam == Team::block ? 2 : kBytes <= 32 ? 4 : 3;
    }
    if (kTeam == Team::cluster) {
      const bool many_parameters = N::kCentered && P == 4 && sizeof(W) == 4;
      return V < 4 || kBytes > 64 || many_parameters ? 1 : 2;
    }
    if (V == 1) {
      return sizeof(T) == 2 && !N::kCentered ? 3 : 2;
    }
    if (kTeam == Team::block) {
      return kShares ? 1 : !kStays && sizeof(T) == 2 ? 3 : 2;
    }
    if (kEdges) {
      return 2;
    }
    if (kStays) {
      return kBytes <= 48 ? 4 : 3;
    }
    return sizeof(T) == 4 ? 6 : 4;
  }();
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
  bool edges = false;  // whether the warp has the row's first or last pack; set by find_edges()

  __device__ Place(const NormForwardPlan& p, int row_columns, int lane, int row_phase)
      : phase(row_phase),
        first((lane / H::kLanes * (P * H::kLanes) + lane % H::kLanes) * V),
        columns(row_columns + row_phase) {
    if constexpr (H::kTeam == Team::cluster) {
      rank = cuda::cluster_rank();
      slab = rank * p.slab;
      first += slab;
      columns = max(slab, min(columns, slab + p.slab));
    }
  }

  /// Sets `edges`.
  __device__ void find_edges() {
    if constexpr (H::kEdges) {
      const int from = threadIdx.x / kWarp * (P * H::kStep) + slab;  // the warp's first column
      edges = from == 0 || columns - from <= P * H::kStep;
    }
  }

  __device__ bool has(int i) const { return first + i * H::kStep < columns; }

  /// Whether pack i, which the row has, is an edge: only its elements first_of(i) to end_of(i) − 1 are in the row.
  __device__ bool is_edge(int i) const { return first_of(i) > 0 || end_of(i) < V; }
  /// False if pack i is an edge in no lane. Call it in all lanes. With many packs, one branch for all lanes is faster.
  __device__ bool may_be_edge(int i) const { return P < 8 || __any_sync(kAllLanes, has(i) && is_edge(i)); }
  __device__ int first_of(int i) const { return i == 0 && first == 0 ? phase : 0; }
  __device__ int end_of(int i) const { return min(V, columns - first - i * H::kStep); }

  __device__ int packs() const { return (columns - first + H::kStep - 1) / H::kStep; }
  __device__ int elements() const {
    const int own_packs = max(0, min(P, packs()));
    int n = V * own_packs;
    if (H::kEdges && edges && own_packs > 0) {
      n -= first_of(0) + V - end_of(own_packs - 1);
    }
    return n;
  }
};

// The rows of a team, from `first` on, `step` apart, before `end`.
template <class H>
struct Run {
  // An int is enough if several warps share a row: the index of a block is an int.
  using Index = std::conditional_t<H::kWarps, int, std::int64_t>;

  Index first;
  Index step;
  Index end;

  __device__ Run(const NormForwardPlan& p, std::int64_t rows, int block)
      : first(block), step(static_cast<Index>(gridDim.x)), end(static_cast<Index>(rows)) {
    const int team = static_cast<int>(threadIdx.y);
    if constexpr (H::kTeam == Team::cluster) {
      first /= p.blocks;
      step /= p.blocks;
    }
    if constexpr (H::kTeam != Team::cluster && (H::kTeam != Team::block || H::kShares)) {
      first = first * p.teams + team;
      step *= p.teams;
    }
  }
};

}  // namespace mica::kernels::norm_cuda
