#pragma once

// Streams rows of a matrix through shared memory, in a persistent kernel: one block per multiprocessor processes many
// rows. Each thread copies ahead (cp.async) the elements that it will use itself. So it never waits for other threads'
// copies, and the threads of a row synchronize only to add up their sums.
//
// A block has blockDim.y groups of blockDim.x threads. Each group processes rows first, first + step, …. If a row is
// too long for a block, `cluster` blocks share it, and each has a slab of its columns. A row, or slab, is cut into C
// chunks. The shared memory holds D chunks per thread, which are in use or still being copied.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/detail/stream_plan.h>

namespace mica::kernels::rows {

#if defined(__CUDACC__)

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
/// sector may begin before the row. Each group of up to a warp has an EdgePlace of its own; all groups of a block or
/// cluster have the same one or, if rows are sorted, the same few. Only the rows of clusters are sorted: there are more
/// places in a sector than clusters.
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

/// Sums a and b over kLanes lanes. Returns the sum of a in the lower half of these lanes, that of b in the upper half.
template <int kLanes>
__device__ float sum_pair_of_lanes(float a, float b) {
  const bool upper = threadIdx.x % kLanes >= kLanes / 2;
  const float mine = (upper ? b : a) + __shfl_xor_sync(kAllLanes, upper ? a : b, kLanes / 2);
  return sum_lanes<kLanes / 2>(mine);
}

/// A thread's ring buffer in shared memory: D chunks with P packs of each of kSources matrices. A `place` is the index
/// of a chunk in the ring.
template <class T, int V, int kSources, int P, int D, int kLanes = kWarp>
class Stream {
 public:
  using Packs = Pack<T, V>;

  __device__ Stream(const StreamPlan& p, unsigned char* memory) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    places_ = reinterpret_cast<Packs*>(memory + p.stream_begin()) + thread / kWarp * (D * kChunk) + thread % kWarp;
  }

  /// Starts copying the first `count` packs of a chunk from each matrix; the chunk's other packs become zeros. What is
  /// read is marked to be evicted last from the L2 cache. Then the written results are evicted first, in the order in
  /// which they were written, which DRAM writes faster.
  template <class... From>
  __device__ void fetch(int place, int count, const From*... from) {
    Packs* to = places_ + place * kChunk;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      int source = 0;
      (cuda::copy_async<sizeof(Packs), /*kLastInL2=*/true>(to + (source++ * P + i) * kWarp,
                                                           i < count ? from + i * (kLanes * V) : from, i < count),
       ...);
    }
  }

  /// The same for rows that may end inside packs. The thread has `left` elements from its first pack on. The other
  /// elements of its last pack become zeros.
  template <class... From>
  __device__ void fetch_elements(int place, int left, const From*... from) {
    Packs* to = places_ + place * kChunk;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const int elements = max(0, min(V, left - i * (kLanes * V)));
      int source = 0;
      (cuda::copy_part_async<sizeof(Packs), /*kLastInL2=*/true>(cuda::shared_address(to + (source++ * P + i) * kWarp),
                                                                elements > 0 ? from + i * (kLanes * V) : from,
                                                                elements * static_cast<int>(sizeof(T))),
       ...);
    }
  }

  /// The thread's pack number i of a chunk.
  __device__ Packs& at(int place, int source, int i) const {
    return places_[place * kChunk + (source * P + i) * kWarp];
  }

  __device__ static int next(int place) { return place + 1 == D ? 0 : place + 1; }

 private:
  static constexpr int kChunk = kSources * P * kWarp;
  Packs* places_;
};

/// Exchanges two numbers per member of a team through shared memory: each member leaves its two numbers, and all
/// members read those of all others. Members are the warps of a block or, in a cluster, its blocks, each of which first
/// adds up its warps' numbers. Leaving does not wait, except that in a cluster, one warp of each block waits for the
/// block's other warps. A warp may be a row ahead of others.
template <Team kTeam>
class Meeting {
 public:
  __device__ Meeting(const StreamPlan& p, int rank, unsigned char* memory)
      : blocks_(p.cluster),
        warps_(p.warps()),
        rank_(rank),
        barriers_(reinterpret_cast<std::uint64_t*>(memory) + threadIdx.y * (kLevels * kMeetings)),
        numbers_(reinterpret_cast<float*>(memory + p.meeting_begin()) +
                 threadIdx.y * (kMeetings * 2 * (warps_ + (kTeam == Team::cluster ? blocks_ : 0)))) {
    if (kTeam != Team::warp && threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kLevels * kMeetings; ++i) {
        cuda::init_barrier(barriers_ + i, i < kMeetings ? 2 * warps_ : 1);
      }
      if (kTeam == Team::cluster) {
        cuda::publish_barriers();
      }
    }
    __syncthreads();  // race checkers want barriers to be initialized before copies begin
  }

  /// Call it after the constructor. Waits until all blocks of the team have initialized their barriers, and until
  /// everything that this block has written to shared memory is visible to its threads.
  __device__ void open() const {
    __syncthreads();
    if (kTeam == Team::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

  /// The number of members whose numbers take() returns.
  __device__ int members() const { return kTeam == Team::cluster ? blocks_ : warps_; }

  /// Leaves a warp's two numbers: `mine` is the first in the lower 16 lanes, the second in the upper ones.
  /// fold(numbers, warps) returns a block's two numbers, in the same lanes, from those of its warps.
  template <class Fold>
  __device__ void leave(float mine, Fold fold) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int slot = left_ % kMeetings;
    float* const in_block = numbers_ + slot * 2 * warps_;
    __syncwarp();  // all lanes have read the numbers of earlier rows
    if (lane % (kWarp / 2) == 0) {
      in_block[lane / (kWarp / 2) * warps_ + warp] = mine;
      cuda::arrive(barriers_ + slot);
    }
    if constexpr (kTeam == Team::cluster) {
      if (left_ % warps_ == warp) {  // the warps take turns
        cuda::wait(barriers_ + slot, left_ / kMeetings % 2);
        const float block = fold(in_block, warps_);
        std::uint64_t* const barrier = barriers_ + kMeetings + slot;
        if (lane == 0) {
          cuda::arrive_expecting(barrier, 2 * blocks_ * static_cast<int>(sizeof(float)));
        }
        float* const place = numbers_ + kMeetings * 2 * warps_ + (slot * 2 + lane / (kWarp / 2)) * blocks_ + rank_;
        if (lane % (kWarp / 2) < blocks_) {
          cuda::send(place, lane % (kWarp / 2), block, barrier);
        }
      }
    }
    ++left_;
  }

  /// Waits until all members have left their numbers for the next row that was not taken yet. Returns the first numbers
  /// of members 0, 1, …, followed by their second numbers.
  __device__ const float* take() {
    const int slot = taken_ % kMeetings;
    constexpr int kLast = kLevels - 1;
    cuda::wait(barriers_ + kLast * kMeetings + slot, taken_ / kMeetings % 2);
    if (kTeam == Team::cluster) {
      // This phase was completed earlier. Waiting for it nevertheless orders this warp after the reads of the other
      // warps, which race checkers recognize, too.
      cuda::wait(barriers_ + slot, taken_ / kMeetings % 2);
    }
    ++taken_;
    return numbers_ + kLast * (kMeetings * 2 * warps_) + slot * 2 * members();
  }

  /// Call it before the kernel ends: blocks must not send numbers to a block that has exited.
  __device__ void close() const {
    if (kTeam == Team::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

 private:
  static constexpr int kLevels = kTeam == Team::cluster ? 2 : 1;

  int blocks_;
  int warps_;
  int rank_;
  unsigned left_ = 0;
  unsigned taken_ = 0;
  std::uint64_t* barriers_;
  float* numbers_;
};

#endif

// On the host.

/// Launches a kernel with `teams` blocks, or clusters of blocks. The kernel takes the plan as its last argument.
template <class Kernel, class Arguments>
void launch_teams(Kernel kernel, const char* name, const StreamPlan& p, unsigned teams, const Arguments& a) {
  cuda::Launch(teams * p.cluster, dim3(p.threads, p.groups), p.shared_bytes())
      .cluster(p.cluster)
      .run(kernel, name, a, p);
}

}  // namespace mica::kernels::rows
