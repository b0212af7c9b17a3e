#pragma once

// Streamed rows: the sizes of the kernel, and which rows and columns a thread has.
//
// A block has blockDim.y groups of blockDim.x threads. Each group processes rows first, first + step, …. If a row is
// too long for a block, `cluster` blocks share it, and each has a slab of its columns. A row, or slab, is cut into C
// chunks. The shared memory holds D chunks per thread, which are in use or still being copied.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/norm/detail/norm_backward_cuda.cuh>

namespace mica::kernels::norm_cuda {

/// Which rows and packs a thread has. Its packs of a row are first_pack, first_pack + kLanes, …, so that those of
/// neighboring lanes are adjacent. If a warp has several rows, these are adjacent, too, and kLanes neighboring lanes
/// share each of them.
template <Team kTeam, int kLanes = kWarp>
struct StreamPlace {
  int rank;                                          // the block's, among those that share a row
  int columns;                                       // in the block's slab
  std::int64_t begin;                                // the slab's first column
  int first_pack;                                    // the thread's first pack, counted from the slab's beginning
  int packs;                                         // how many the thread has
  std::int64_t first;                                // the thread's first row
  std::int64_t warp_first;                           // the warp's first row
  std::int64_t step;                                 // from a row to the thread's next one
  static constexpr int kNeighbors = kWarp / kLanes;  // rows of a warp

  __device__ StreamPlace(const StreamPlan& p, std::int64_t row_columns, int pack_columns, int most_packs) {
    rank = block_rank();
    begin = kTeam == Team::cluster ? std::int64_t{rank} * p.slab : 0;
    const std::int64_t left = row_columns - begin;
    columns = static_cast<int>(left < 0 ? 0 : left < p.slab ? left : p.slab);
    const int lane = threadIdx.x % kLanes;
    first_pack = threadIdx.x / kLanes * (most_packs * kLanes) + lane;
    const int packs_left = (columns / pack_columns - first_pack + kLanes - 1) / kLanes;
    packs = packs_left < 0 ? 0 : packs_left < most_packs ? packs_left : most_packs;
    first = first_row(p, threadIdx.y);
    warp_first = first - threadIdx.y % kNeighbors;
    step = teams(p) * blockDim.y;
  }

  /// The first row of a group of the block.
  __device__ static std::int64_t first_row(const StreamPlan& p, int group) {
    return (group / kNeighbors * teams(p) + team(p)) * kNeighbors + group % kNeighbors;
  }

  /// The thread's rows are before this one, if the matrix has `rows` rows.
  __device__ static std::int64_t end(std::int64_t rows) { return rows; }

  __device__ static int teams(const StreamPlan& p) { return gridDim.x / (kTeam == Team::cluster ? p.cluster : 1); }
  __device__ static int team(const StreamPlan& p) { return blockIdx.x / (kTeam == Team::cluster ? p.cluster : 1); }
  __device__ static int block_rank() { return kTeam == Team::cluster ? cuda::cluster_rank() : 0; }
  /// The number of the row of partial sums of these rows.
  __device__ int partial_row(const StreamPlan& p) const { return team(p); }
};

/// The number of elements of a row's first sector that are before the row.
template <class T>
__device__ int phase_of(const StreamPlan& p, const T* row) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T)) & (p.sector - 1);
}

/// The same for rows that begin and end inside packs of V columns. All rows of an EdgePlace begin at the same place in
/// a sector, so that a thread has the same columns of all of them. Packs are aligned, and those of the row's first
/// sector may begin before the row. A group of up to a warp has an EdgePlace of its own. All groups of a block or
/// cluster share one or, if rows are sorted, a few in turn. Only the rows of clusters are sorted: there are more places
/// in a sector than clusters.
template <Team kTeam, int V, int kLanes>
struct EdgePlace : StreamPlace<kTeam, kLanes> {
  using Base = StreamPlace<kTeam, kLanes>;
  static constexpr bool kMaySort = kTeam == Team::cluster;
  int like;                 // the first row of the matrix that begins at this place
  std::int64_t sorted_end;  // the thread's rows are before it, if they are sorted
  int head;                 // elements of the thread's first pack that are before the row
  int left;  // columns of the row, or of the block's slab of it, from the beginning of the thread's first pack on
  int cut;   // the thread's pack inside which the row ends; −1 if there is none

  /// For the team's rows that begin like row number `like`: after `phase` elements of a sector.
  __device__ EdgePlace(const StreamPlan& p, std::int64_t rows, std::int64_t row_columns, int like, int phase,
                       int most_packs)
      : Base(p, row_columns + phase, V, most_packs), like(like), sorted_end(rows) {
    this->begin -= phase;
    // The sector may begin with a pack that is not in the row. If the row needs it, its lane gets the row's last pack.
    const bool needed = row_columns + p.sector - 1 > most_packs * kStep;
    if (kTeam == Team::warp && needed && (this->first_pack + 1) * V <= phase) {
      this->first_pack += kLanes;
    }
    left = this->columns - this->first_pack * V;
    this->packs = max(0, min(most_packs, (left + kStep - 1) / kStep));
    head = this->rank == 0 ? max(0, min(V, phase - this->first_pack * V)) : 0;
    cut = this->packs > 0 && left < (this->packs - 1) * kStep + V ? this->packs - 1 : -1;
    if (kMaySort && p.sorted) {
      const std::int64_t begin = start(p, rows, like);
      const auto row_at = [&](std::int64_t position) { return like + (position - begin) * p.phases; };
      this->first = row_at(max(begin, own_begin(p, rows, this->team(p))) + threadIdx.y);
      this->warp_first = this->first;
      this->step = static_cast<int>(blockDim.y) * p.phases;
      sorted_end = row_at(min(start(p, rows, like + 1), own_begin(p, rows, this->team(p) + 1)));
    }
  }

  __device__ std::int64_t end(std::int64_t rows) const { return kMaySort ? sorted_end : rows; }

  /// Whether the team has a place for the rows that begin like row number `like`. If rows are sorted, its last place is
  /// the one with which the next team begins, even if it has no rows there. So for any number of rows, there is exactly
  /// one place for each partial_row() from 0 to teams + phases − 2.
  __device__ static bool has(const StreamPlan& p, std::int64_t rows, int like) {
    const int team = Base::team(p);
    return kMaySort && p.sorted ? start(p, rows, like) <= own_begin(p, rows, team + 1) &&
                                      start(p, rows, like + 1) > own_begin(p, rows, team)
                                : like == team % p.phases;
  }
  __device__ int partial_row(const StreamPlan& p) const { return this->team(p) + (kMaySort && p.sorted ? like : 0); }

  /// Whether all elements of the thread's pack i are in the row.
  __device__ bool is_whole(int i) const { return (i > 0 || head == 0) && i * kStep + V <= left; }
  /// Whether element j of the thread's pack i is in the row.
  __device__ bool has_element(int i, int j) const { return (i > 0 || j >= head) && i * kStep + j < left; }

 private:
  static constexpr int kStep = kLanes * V;  // columns from a pack to the thread's next one

  // Of the rows, sorted by where they begin: the first one that begins like row number `like`, and a team's first one.
  __device__ static std::int64_t start(const StreamPlan& p, std::int64_t rows, int like) {
    return rows / p.phases * like + min(static_cast<std::int64_t>(like), rows % p.phases);
  }
  __device__ static std::int64_t own_begin(const StreamPlan& p, std::int64_t rows, int team) {
    return rows * team / Base::teams(p);
  }
};

/// The sizes of a kernel that streams rows. A pack has V columns. A thread has P packs of a row, in C chunks, of which
/// the shared memory holds D. A row belongs to kLanes lanes of a warp, or to all threads of a larger team. kEdges: rows
/// may begin and end inside packs (EdgePlace).
template <int V_, int P_, Team kTeam_, int kLanes_, int C_, int D_, bool kEdges_ = false>
struct StreamShape {
  static constexpr int V = V_;
  static constexpr int P = P_;
  static constexpr Team kTeam = kTeam_;
  static constexpr int kLanes = kLanes_;
  static constexpr int C = C_;
  static constexpr int D = D_;
  static constexpr bool kEdges = kEdges_;
  // Whether each group has its own place in a sector at which its rows begin.
  static constexpr bool kOwnPhases = kEdges && kTeam == Team::warp;
  static constexpr int kChunk = P / C;  // packs
  static_assert(C * kChunk == P);
  using Place = std::conditional_t<kEdges, EdgePlace<kTeam, V, kLanes>, StreamPlace<kTeam, kLanes>>;
};

}  // namespace mica::kernels::norm_cuda
