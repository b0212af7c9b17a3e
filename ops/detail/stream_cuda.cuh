#pragma once

// Rows of a matrix that stream through shared memory. One block stays on each multiprocessor for the whole kernel; each
// thread copies the elements of rows to come that it will itself use, so that it need not wait for other threads to
// read them, and a row's threads meet only to add up.
//
// A block has blockDim.y groups of blockDim.x threads, and each group has rows of its own: first, first + step, ….
// Where a row is too long for a block, `cluster` blocks share it, each with a slab of its columns. A row, or slab, is
// cut into C chunks; the shared memory holds D chunks of each thread, in use or under way.

#include <algorithm>
#include <cstdint>

#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/detail/stream_plan.h>

namespace mica::kernels::rows {

#if defined(__CUDACC__)

/// A thread's place. Its packs of a row are first_pack, first_pack + kLanes, …: a warp's lie one after another. Of a
/// warp that has several rows, kLanes neighboring lanes share one, and the rows are neighbors.
template <Team kTeam, int kLanes = kWarp>
struct StreamPlace {
  int rank;                 // of the block among those that share a row
  int columns;              // of the slab
  std::int64_t begin;       // the slab's first column
  int first_pack;           // in the slab
  int packs;                // of the thread
  std::int64_t first;       // row
  std::int64_t warp_first;  // of the warp's groups
  std::int64_t step;

  __device__ StreamPlace(const StreamPlan& p, std::int64_t row_columns, int pack_columns, int most_packs) {
    rank = kTeam == Team::cluster ? cuda::cluster_rank() : 0;
    begin = kTeam == Team::cluster ? std::int64_t{rank} * p.slab : 0;
    const std::int64_t left = row_columns - begin;
    columns = static_cast<int>(left < 0 ? 0 : left < p.slab ? left : p.slab);
    const int lane = threadIdx.x % kLanes;
    first_pack = threadIdx.x / kLanes * (most_packs * kLanes) + lane;
    const int row_packs = pack_columns == 2 ? (columns + 1) / 2 : columns / pack_columns;  // pairs may be cut
    const int packs_left = (row_packs - first_pack + kLanes - 1) / kLanes;
    packs = packs_left < 0 ? 0 : packs_left < most_packs ? packs_left : most_packs;
    const int teams = kTeam == Team::cluster ? gridDim.x / p.cluster : gridDim.x;
    const int team = kTeam == Team::cluster ? blockIdx.x / p.cluster : blockIdx.x;
    constexpr int kNeighbors = kWarp / kLanes;
    first = (threadIdx.y / kNeighbors * teams + team) * kNeighbors + threadIdx.y % kNeighbors;
    warp_first = first - threadIdx.y % kNeighbors;
    step = teams * blockDim.y;
  }
};

/// V columns in a pack. A thread has P packs of a row, which `kLanes` lanes of a warp share, or more threads; it comes
/// in C chunks, of which the shared memory holds D. kUnits: rows begin anywhere, packs are words of 4 bytes, and the
/// lanes of a warp copy the units of 16 bytes in which they lie, for each other; else each copies its own packs.
template <int V_, int P_, Team kTeam_, int kLanes_, int C_, int D_, bool kUnits_ = false>
struct StreamShape {
  static constexpr int V = V_;
  static constexpr int P = P_;
  static constexpr Team kTeam = kTeam_;
  static constexpr int kLanes = kLanes_;
  static constexpr int C = C_;
  static constexpr int D = D_;
  static constexpr bool kUnits = kUnits_;
  static constexpr int kChunk = P / C;  // packs
  static_assert(C * kChunk == P);
  using Place = StreamPlace<kTeam, kLanes>;
};

/// The sums of a and of b over kLanes lanes: the lower half of them has the one, the upper the other.
template <int kLanes>
__device__ float sum_pair_of_lanes(float a, float b) {
  const bool upper = threadIdx.x % kLanes >= kLanes / 2;
  const float mine = (upper ? b : a) + __shfl_xor_sync(kAllLanes, upper ? a : b, kLanes / 2);
  return sum_lanes<kLanes / 2>(mine);
}

/// The thread's part of the shared memory through which its packs of kSources matrices stream: D chunks of P packs of
/// each.
template <class T, int V, int kSources, int P, int D, int kLanes = kWarp>
class Stream {
 public:
  using Packs = Pack<T, V>;

  __device__ Stream(const StreamPlan& p, unsigned char* memory) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    places_ = reinterpret_cast<Packs*>(memory + p.stream_begin()) + thread / kWarp * (D * kChunk) + thread % kWarp;
  }

  /// Starts copying the first `count` packs of a chunk from there on; the others become zeros. No place needs
  /// to be cleared first. What was read stays in the L2 cache longest: what is written then leaves it in the order in
  /// which it came, which suits memory.
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

  /// Pack number i of a chunk.
  __device__ Packs& at(int place, int source, int i) const {
    return places_[place * kChunk + (source * P + i) * kWarp];
  }

  __device__ static int next(int place) { return place + 1 == D ? 0 : place + 1; }

 private:
  static constexpr int kChunk = kSources * P * kWarp;
  Packs* places_;
};

/// The same for one matrix of rows that begin anywhere, of single elements: kLanes lanes copy the units of 16 bytes in
/// which their elements lie, P for each. So they have to meet where one of them uses what others have copied. Several
/// matrices have a stream each: `source` is the number of this one.
template <class T, int P, int D, int kLanes = kWarp>
class WarpStream {
 public:
  static constexpr int kElements = P * kLanes;  // of a chunk
  static constexpr int kUnit = 16 / sizeof(T);
  static constexpr int kInWord = 4 / sizeof(T);
  static constexpr int kUnits = kElements + kUnit;  // elements of the units that a chunk may lie in
  static constexpr int kStreamBytes = D * kUnits * static_cast<int>(sizeof(T));
  static_assert(kElements % kUnit == 0);

  __device__ WarpStream(const StreamPlan& p, unsigned char* memory, int source = 0, int sources = 1) {
    const int team = (threadIdx.y * blockDim.x + threadIdx.x) / kLanes;
    places_ = reinterpret_cast<T*>(memory + p.stream_begin()) + (team * sources + source) * (D * kUnits);
    address_ = cuda::shared_address(places_);
  }

  /// In memory of a block's own, of kStreamBytes. The shuffle keeps its address out of a uniform register: of a copy to
  /// such a register + another, ptxas 13.0 makes an illegal instruction.
  __device__ explicit WarpStream(unsigned char* memory)
      : places_(reinterpret_cast<T*>(memory)), address_(__shfl_sync(kAllLanes, cuda::shared_address(memory), 0)) {}

  /// Where in its first unit what begins at `from` has its first element.
  __device__ static int phase(const T* from) { return reinterpret_cast<std::uintptr_t>(from) / sizeof(T) % kUnit; }

  /// Starts copying a chunk that begins at `from`. Of the row, `left` elements are left; units past its end become
  /// zeros. What precedes `from` in its unit is read too, and what follows the row in its last one; but nothing that
  /// follows the matrix, which ends at `matrix_end`.
  __device__ void fetch_units(int place, const T* from, int left, const T* matrix_end) const {
    const int skipped = phase(from);
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int end = left > 0 ? min(left + skipped, kUnits) : 0;
    const unsigned char* const units = first_unit(from) + lane * 16;
    const std::uint32_t to = place_address(place) + lane * 16;
    int whole = end;
    int cut = kUnits;  // the unit inside of which the matrix ends
    if (from + kUnits > matrix_end && end > 0) {
      whole = min(end, (static_cast<int>(matrix_end - from) + skipped) / kUnit * kUnit);
      cut = whole < end ? whole : kUnits;
    }
#pragma unroll
    for (int i = 0; i <= kElements; i += kLanes * kUnit) {
      const int unit = i + lane * kUnit;
      if ((i + kLanes * kUnit <= kElements || unit <= kElements) && unit != cut) {
        cuda::copy_async<16, /*kLastInL2=*/true>(to + i * kSize, units + i * kSize, unit < whole);
      }
    }
    if (lane < kUnit && cut + lane < end) {  // waits: after the copies
      places_[place * kUnits + cut + lane] = from[cut + lane - skipped];
    }
  }

  /// Puts `value` where what follows the last `left` elements of a row lies in their unit. Lanes have to meet before
  /// and after.
  __device__ void clear(int place, int phase, int left, T value = static_cast<T>(0.0f)) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    if (left > 0 && left < kElements && lane < kUnit && left + lane < kElements) {
      places_[place * kUnits + phase + left + lane] = value;
    }
  }

  /// Element number i of a chunk that began at such a phase.
  __device__ T element(int place, int phase, int i) const { return places_[place * kUnits + phase + i]; }

  /// The lane's element number i of a chunk that began at such a phase.
  __device__ T& at(int place, int phase, int i) const {
    return places_[place * kUnits + phase + i * kLanes + threadIdx.x % kLanes];
  }

  /// The lane's words of a chunk that began at such a phase. Word number i has the elements from kInWord (i · kLanes +
  /// lane) on.
  template <int kWords>
  __device__ void load_words(int place, int phase, Pack<T, kInWord> (&words)[kWords]) const {
    const std::uint32_t* const from = first_word(place, phase);
    std::uint32_t bits[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      bits[i] = from[i * kLanes];
    }
    if (phase % kInWord != 0) {  // the upper half of one and the lower half of the next
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

  /// Writes them there.
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

  /// Writes the first `count` elements of a chunk, which lie at the phase of `to`, in whole units where it can.
  __device__ void write(int place, T* to, int count = kElements) const {
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
    // What is left of the first unit, and of the last one, which other lanes write if there are some.
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

  // The unit in which an element lies.
  __device__ static const unsigned char* first_unit(const T* element) {
    return reinterpret_cast<const unsigned char*>(reinterpret_cast<std::uintptr_t>(element) & ~std::uintptr_t{15});
  }
  __device__ std::uint32_t place_address(int place) const { return address_ + place * (kUnits * kSize); }

  // The word in which what begins at such a phase has its first element for the lane.
  __device__ std::uint32_t* first_word(int place, int phase) const {
    return reinterpret_cast<std::uint32_t*>(places_ + place * kUnits) + phase / kInWord + threadIdx.x % kLanes;
  }

  T* places_;
  std::uint32_t address_;
};

/// Where those who share a row leave two numbers each, and read those of all: the warps of a block, or the blocks of a
/// cluster, whose warps have met before. Hardly any waits to leave them: of a block in a cluster one warp does, for the
/// others of its block. A warp may be a row ahead of others.
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
    __syncthreads();  // race checkers want barriers to be there before copies begin
  }

  /// To follow the constructor: the barriers of the other blocks, and what else a block has written, are there.
  __device__ void open() const {
    __syncthreads();
    if (kTeam == Team::cluster) {
      cuda::arrive_in_cluster();
      cuda::wait_for_cluster();
    }
  }

  /// How many take part in the last meeting of a row.
  __device__ int members() const { return kTeam == Team::cluster ? blocks_ : warps_; }

  /// Leaves a warp's `mine`, of which the lower 16 lanes have the first number and the upper ones the second.
  /// fold(numbers, warps) returns those of a block from its warps', in the same lanes.
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
      if (left_ % warps_ == warp) {  // the warps take turns at it
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

  /// Waits until all have left theirs for the first row not yet taken. Returns the first numbers of members 0, 1, …;
  /// the second ones follow.
  __device__ const float* take() {
    const int slot = taken_ % kMeetings;
    constexpr int kLast = kLevels - 1;
    cuda::wait(barriers_ + kLast * kMeetings + slot, taken_ / kMeetings % 2);
    if (kTeam == Team::cluster) {
      // Passed long since; but a warp that has it knows, as race checkers do, that the warps before have read theirs.
      cuda::wait(barriers_ + slot, taken_ / kMeetings % 2);
    }
    ++taken_;
    return numbers_ + kLast * (kMeetings * 2 * warps_) + slot * 2 * members();
  }

  /// To precede the end: nobody sends to a block that has ended.
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

/// Launches a kernel that takes the plan as its last argument, with so many teams, blocks or clusters.
template <class Kernel, class Arguments>
void launch_teams(Kernel kernel, const char* name, const StreamPlan& p, unsigned teams, const Arguments& a) {
  cuda::Launch(teams * p.cluster, dim3(p.threads, p.groups), p.shared_bytes())
      .cluster(p.cluster)
      .run(kernel, name, a, p);
}

}  // namespace mica::kernels::rows
