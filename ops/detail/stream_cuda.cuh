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
  int rank;                 // the block's, among those that share a row
  int columns;              // in the block's slab
  std::int64_t begin;       // the slab's first column
  int first_pack;           // the thread's first pack, counted from the slab's beginning
  int packs;                // how many the thread has
  std::int64_t first;       // the thread's first row
  std::int64_t warp_first;  // the warp's first row
  std::int64_t step;        // from a row to the thread's next one

  __device__ StreamPlace(const StreamPlan& p, std::int64_t row_columns, int pack_columns, int most_packs) {
    rank = block_rank();
    begin = kTeam == Team::cluster ? std::int64_t{rank} * p.slab : 0;
    const std::int64_t left = row_columns - begin;
    columns = static_cast<int>(left < 0 ? 0 : left < p.slab ? left : p.slab);
    const int lane = threadIdx.x % kLanes;
    first_pack = threadIdx.x / kLanes * (most_packs * kLanes) + lane;
    const int row_packs = pack_columns == 2 ? (columns + 1) / 2 : columns / pack_columns;  // the last pair may be half
    const int packs_left = (row_packs - first_pack + kLanes - 1) / kLanes;
    packs = packs_left < 0 ? 0 : packs_left < most_packs ? packs_left : most_packs;
    constexpr int kNeighbors = kWarp / kLanes;
    first = (threadIdx.y / kNeighbors * teams(p) + team(p)) * kNeighbors + threadIdx.y % kNeighbors;
    warp_first = first - threadIdx.y % kNeighbors;
    step = teams(p) * blockDim.y;
  }

  /// The thread's rows are before this one, if the matrix has `rows` rows.
  __device__ static std::int64_t end(std::int64_t rows) { return rows; }

  __device__ static int teams(const StreamPlan& p) { return gridDim.x / (kTeam == Team::cluster ? p.cluster : 1); }
  __device__ static int team(const StreamPlan& p) { return blockIdx.x / (kTeam == Team::cluster ? p.cluster : 1); }
  __device__ static int block_rank() { return kTeam == Team::cluster ? cuda::cluster_rank() : 0; }
  /// The number of the row of partial sums of these rows.
  __device__ int partial_row(const StreamPlan& p) const { return team(p); }
};

/// The same for rows that begin and end inside packs of V columns. All rows of an EdgePlace begin at the same place in
/// a sector, so that a thread has the same columns of all of them. Packs are aligned, and those of the row's first
/// sector may begin before the row. A team has the rows of one EdgePlace or, if they are sorted, of a few. Only the
/// rows of clusters are sorted: there are more places in a sector than clusters.
template <Team kTeam, int V>
struct EdgePlace : StreamPlace<kTeam> {
  static constexpr bool kMaySort = kTeam == Team::cluster;
  int like;                 // the first row of the matrix that begins at this place
  std::int64_t sorted_end;  // the thread's rows are before it, if they are sorted
  int head;                 // elements of the thread's first pack that are before the row
  int left;  // columns of the row, or of the block's slab of it, from the beginning of the thread's first pack on
  int cut;   // the thread's pack inside which the row ends; −1 if there is none

  /// For the team's rows that begin like row number `like`: after `phase` elements of a sector.
  __device__ EdgePlace(const StreamPlan& p, std::int64_t rows, std::int64_t row_columns, int like, int phase,
                       int most_packs)
      : StreamPlace<kTeam>(p, row_columns + phase, V, most_packs), like(like), sorted_end(rows) {
    this->begin -= phase;
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
    const int team = StreamPlace<kTeam>::team(p);
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
  static constexpr int kStep = kWarp * V;  // columns from a pack to the thread's next one

  // Of the rows, sorted by where they begin: the first one that begins like row number `like`, and a team's first one.
  __device__ static std::int64_t start(const StreamPlan& p, std::int64_t rows, int like) {
    return rows / p.phases * like + min(static_cast<std::int64_t>(like), rows % p.phases);
  }
  __device__ static std::int64_t own_begin(const StreamPlan& p, std::int64_t rows, int team) {
    return rows * team / StreamPlace<kTeam>::teams(p);
  }
};

/// How rows lie in memory, and are copied.
/// - packs: rows consist of aligned packs, and each thread copies its own;
/// - edges: the same, but rows may begin and end inside packs (EdgePlace);
/// - units: rows may begin anywhere. Packs are at most 4 bytes wide, and the lanes of a warp together copy the aligned
///   units of 16 bytes that contain their packs.
enum class Copies { packs, edges, units };

/// The sizes of a kernel that streams rows. A pack has V columns. A thread has P packs of a row, in C chunks, of which
/// the shared memory holds D. A row belongs to kLanes lanes of a warp, or to all threads of a larger team.
template <int V_, int P_, Team kTeam_, int kLanes_, int C_, int D_, Copies kCopies = Copies::packs>
struct StreamShape {
  static constexpr int V = V_;
  static constexpr int P = P_;
  static constexpr Team kTeam = kTeam_;
  static constexpr int kLanes = kLanes_;
  static constexpr int C = C_;
  static constexpr int D = D_;
  static constexpr bool kUnits = kCopies == Copies::units;
  static constexpr bool kEdges = kCopies == Copies::edges;
  static constexpr int kChunk = P / C;  // packs
  static_assert(C * kChunk == P && (!kEdges || kLanes == kWarp));
  using Place = std::conditional_t<kEdges, EdgePlace<kTeam, V>, StreamPlace<kTeam, kLanes>>;
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

/// The ring buffer of kLanes lanes for one matrix whose rows begin at any address. A chunk has P elements per lane. The
/// lanes together copy the aligned units of 16 bytes that contain the chunk, so they have to synchronize before they
/// use what other lanes have copied. The `phase` of a chunk is the index of its first element in the first unit. A
/// kernel of several matrices has a WarpStream for each.
template <class T, int P, int D, int kLanes = kWarp>
class WarpStream {
 public:
  static constexpr int kElements = P * kLanes;  // per chunk
  static constexpr int kUnit = 16 / sizeof(T);
  static constexpr int kInWord = 4 / sizeof(T);
  static constexpr int kUnits = kElements + kUnit;  // elements in all units that a chunk may touch
  static constexpr int kStreamBytes = D * kUnits * static_cast<int>(sizeof(T));
  static_assert(kElements % kUnit == 0);

  /// The stream of matrix number `source` out of `sources`.
  __device__ WarpStream(const StreamPlan& p, unsigned char* memory, int source, int sources) {
    const int team = (threadIdx.y * blockDim.x + threadIdx.x) / kLanes;
    places_ = reinterpret_cast<T*>(memory + p.stream_begin()) + (team * sources + source) * (D * kUnits);
    address_ = cuda::shared_address(places_);
  }

  /// The index of element *from in its unit of 16 bytes.
  __device__ static int phase(const T* from) { return reinterpret_cast<std::uintptr_t>(from) / sizeof(T) % kUnit; }

  /// Starts copying a chunk that begins at `from`. The row has `left` elements from there on; units past its end become
  /// zeros. Copies whole units, including the elements before `from` in the first one and those after the row's end in
  /// the last one, but reads nothing past the end of the matrix. Rows must have at least kUnit elements.
  __device__ void fetch_units(int place, const T* from, int left, bool in_last_row) const {
    const int skipped = phase(from);
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int end = left > 0 ? min(left + skipped, kUnits) : 0;
    const unsigned char* const units = first_unit(from) + lane * 16;
    const std::uint32_t to = place_address(place) + lane * 16;
    const int whole = in_last_row ? end / kUnit * kUnit : end;
    const int cut = whole < end ? whole : kUnits;  // the unit inside which the matrix ends
#pragma unroll
    for (int i = 0; i <= kElements; i += kLanes * kUnit) {
      const int unit = i + lane * kUnit;
      if ((i + kLanes * kUnit <= kElements || unit <= kElements) && unit != cut) {
        cuda::copy_async<16, /*kLastInL2=*/true>(to + i * kSize, units + i * kSize, unit < whole);
      }
    }
    if (lane < kUnit && cut + lane < end) {  // last, since these loads block
      places_[place * kUnits + cut + lane] = from[cut + lane - skipped];
    }
  }

  /// Overwrites the elements after the row's end with zeros, as far as the row's last unit may extend. The row has
  /// `left` elements from the chunk's beginning on. Call __syncwarp() before and after.
  __device__ void clear(int place, int phase, int left) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    if (left > 0 && left < kElements && lane < kUnit && left + lane < kElements) {
      places_[place * kUnits + phase + left + lane] = static_cast<T>(0.0f);
    }
  }

  /// The lane's element number i of a chunk.
  __device__ T& at(int place, int phase, int i) const {
    return places_[place * kUnits + phase + i * kLanes + threadIdx.x % kLanes];
  }

  /// The lane's 32-bit words of a chunk. Word number i begins with element kInWord · (i · kLanes + lane) of the chunk.
  template <int kWords>
  __device__ void load_words(int place, int phase, Pack<T, kInWord> (&words)[kWords]) const {
    const std::uint32_t* const from = first_word(place, phase);
    std::uint32_t bits[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bits[i] = from[i * kLanes];
    }
    if (phase % kInWord != 0) {  // a result is the upper half of one word and the lower half of the next
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        bits[i] = __funnelshift_r(bits[i], from[i * kLanes + 1], 16);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = reinterpret_cast<const Pack<T, kInWord>&>(bits[i]);
    }
  }

  /// The inverse of load_words().
  template <int kWords>
  __device__ void store_words(int place, int phase, const Pack<T, kInWord> (&words)[kWords]) const {
    if (phase % kInWord == 0) {
      std::uint32_t* const to = first_word(place, phase);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        to[i * kLanes] = reinterpret_cast<const std::uint32_t&>(words[i]);
      }
    } else {
      T* const to = places_ + place * kUnits + phase + threadIdx.x % kLanes * kInWord;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
#pragma unroll
        for (int j = 0; j < kInWord; ++j) {
          to[i * (kLanes * kInWord) + j] = words[i].at[j];
        }
      }
    }
  }

  /// Writes the first `count` elements of a chunk, whose phase is that of `to`, to global memory: whole units where
  /// possible.
  __device__ void write(int place, T* to, int count) const {
    const int begin = phase(to);
    const int end = begin + min(count, kElements);
    const int last = end / kUnit * kUnit;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const T* const from = places_ + place * kUnits;
    unsigned char* const units = const_cast<unsigned char*>(first_unit(to));
#pragma unroll
    for (int i = 0; i < kElements; i += kLanes * kUnit) {
      const int unit = i + lane * kUnit;
      if (unit >= begin && unit < last) {
        store_whole(units + lane * 16 + i * kSize, load<kUnit>(from + unit));
      }
    }
    // The incomplete first unit, and the incomplete last one, for which other lanes are used if there are enough.
    T* const elements = reinterpret_cast<T*>(units);
    if (lane < kUnit && begin > 0 && lane >= begin && lane < end) {
      elements[lane] = from[lane];
    }
    const int tail = last + (kLanes > kUnit ? lane - kUnit : lane);
    if (tail >= last && tail < end && (last > 0 || begin == 0)) {
      elements[tail] = from[tail];
    }
  }

 private:
  static constexpr int kSize = sizeof(T);

  // The unit that contains an element.
  __device__ static const unsigned char* first_unit(const T* element) {
    return reinterpret_cast<const unsigned char*>(reinterpret_cast<std::uintptr_t>(element) & ~std::uintptr_t{15});
  }
  __device__ std::uint32_t place_address(int place) const { return address_ + place * (kUnits * kSize); }

  // The word that contains the lane's first element of a chunk.
  __device__ std::uint32_t* first_word(int place, int phase) const {
    return reinterpret_cast<std::uint32_t*>(places_ + place * kUnits) + phase / kInWord + threadIdx.x % kLanes;
  }

  T* places_;
  std::uint32_t address_;
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
