#pragma once

// Rows that are read once and stay with the threads that share them until their results are written.
//
//     held:    memory ──16 bytes a thread──▶ registers ─▶ sums ─▶ registers ──16 bytes a thread──▶ memory
//     staged:  memory ──16 bytes a thread──▶ shared memory ─▶ sums ─▶ shared memory ──16 bytes a thread──▶ memory
//
// A team shares a row: lanes of a warp, a block, or a cluster of blocks that have a slab of its columns each. A row is
// staged if it is too long for the registers, or long and does not begin and end at multiples of 16 bytes. Then a block
// copies its row, or slab of one, into shared memory.
//
// Which thread has which columns, and the order of sums, depend on the row's length and on the alignment of pointers.

#include <cstdint>
#include <limits>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/dtype.h>
#include <mica/ops/detail/row_team.h>
#include <mica/ops/detail/rows_cuda.cuh>

namespace mica::kernels::held {

using rows::kAllLanes;
using rows::kWarp;
using rows::Pack;

/// What threads find in a row is a type that has
///     Found empty() const;                // before anything was found
///     void join(const Found&);            // adds what others have found
///     Found over_lanes(int lanes) const;  // what neighboring lanes have found, to the same bits in each
///     kNumbers and for_numbers(f)         // f(k, number) for its numbers, floats or doubles, of which `sum` is one
template <class Found>
using NumberOf = decltype(Found::sum);

/// A block's place: its row, and the columns of it that it has.
template <Team kTeam>
struct Place {
  std::int64_t row;
  std::int64_t begin;  // the first of its columns
  int columns;         // 0: the thread has no row
  int rank;            // of the block in the cluster

  __device__ Place(const RowPlan& plan, std::int64_t rows, std::int64_t row_columns) {
    if constexpr (kTeam == Team::cluster) {
      rank = cuda::cluster_rank();
      row = blockIdx.x / plan.cluster;
      begin = std::int64_t{rank} * plan.slab;
    } else {
      rank = 0;
      row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
      begin = 0;
    }
    const std::int64_t left = row_columns - begin;
    columns = row >= rows || left <= 0 ? 0 : static_cast<int>(left < plan.slab ? left : plan.slab);
  }
};

/// The same number or address, of which the compiler does not know how it was computed: it is kept, and not computed
/// again where it is used.
__device__ inline int opaque(int n) {
  asm volatile("" : "+r"(n));
  return n;
}
template <class T>
__device__ T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

/// A thread's packs of a row, V columns each, in registers. kPacked: as they were read, which takes half the registers
/// for 16-bit elements; otherwise as what they are computed with, and they may be replaced.
template <class T, int V, int P, bool kPacked>
class HeldPacks {
 public:
  using S = Accumulate<T>;
  static constexpr int kWords = P * V * static_cast<int>(kPacked ? sizeof(T) : sizeof(S)) / 4;

  __device__ void set(int i, const Pack<T, V>& pack) {
    if constexpr (kPacked) {
      held_[i] = reinterpret_cast<const Word&>(pack);
    } else {
      unpack(pack, held_[i].at);
    }
  }

  __device__ void values(int i, S (&x)[V]) const {
    if constexpr (kPacked) {
      unpack(pack(i), x);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[j] = held_[i].at[j];
      }
    }
  }
  __device__ const Pack<T, V>& pack(int i) const {
    static_assert(kPacked);
    return reinterpret_cast<const Pack<T, V>&>(held_[i]);
  }

  __device__ void replace(int i, const S (&x)[V]) {
    static_assert(!kPacked);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      held_[i].at[j] = x[j];
    }
  }

  /// Changes nothing, in a way that the compiler cannot know: it would keep what it has unpacked for a sum.
  __device__ void forget() {
    const unsigned zero = threadIdx.z;
#pragma unroll
    for (auto& word : held_) {
      if constexpr (std::is_same_v<Word, uint4>) {
        word = make_uint4(word.x | zero, word.y | zero, word.z | zero, word.w | zero);
      } else if constexpr (std::is_same_v<Word, uint2>) {
        word = make_uint2(word.x | zero, word.y | zero);
      } else if constexpr (std::is_same_v<Word, unsigned>) {
        word |= zero;
      }
    }
  }

 private:
  // Words, where it is 16-bit elements: the compiler would take those apart as soon as they are there.
  using Narrow = std::conditional_t<V == 8, uint4, std::conditional_t<V == 4, uint2, unsigned>>;
  using Word = std::conditional_t<!kPacked, Pack<S, V>, std::conditional_t<sizeof(T) == 2, Narrow, Pack<T, V>>>;
  static_assert(!kPacked || sizeof(Word) == sizeof(Pack<T, V>));

  Word held_[P];
};

/// Where the warps of a team leave what they have found, and read that of all: once, or again and again with two
/// buffers, which are used in turn.
///
/// In a cluster, each warp sends its own to every block of it, whose barrier counts the bytes: blocks do not wait for
/// each other except for these, and not for what they have written to memory.
template <class Found, Team kTeam, int kBuffers = 1>
class Exchange {
  using Number = NumberOf<Found>;
  static constexpr int kNumbers = Found::kNumbers;
  static constexpr bool kCluster = kTeam == Team::cluster;
  static constexpr bool kWarps = kCluster || kTeam == Team::block;
  static constexpr int kPlaces = kCluster ? kMostCluster * kMostTeamThreads / kWarp
                                 : kWarps ? kMostTeamThreads / kWarp
                                          : 1;

 public:
  struct Shared {
    Number numbers[kBuffers][kNumbers][kPlaces];
    std::uint64_t arrived[kBuffers];
  };

  /// blocks: that share a row. To precede loads from memory: in a cluster, it waits for those under way.
  __device__ explicit Exchange(Shared& shared, int blocks = 1)
      : shared_(shared), warps_(static_cast<int>(blockDim.x) / kWarp), blocks_(kCluster ? blocks : 1) {
    if constexpr (kCluster) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int buffer = 0; buffer < kBuffers; ++buffer) {
          cuda::init_barrier(&shared_.arrived[buffer], 1);
          expect(buffer);
        }
        cuda::publish_barriers();
      }
      __syncwarp();
      cuda::arrive_in_cluster();
    }
  }

  /// What the team has found, to the same bits in all its threads. rank: of the block in its cluster.
  __device__ Found joined(const Found& mine, int rank) { return joined_warps(mine.over_lanes(kWarp), rank); }

  /// The same from what a warp, or the lanes that share a row, have found.
  __device__ Found joined_warps(Found warp, int rank) {
    if constexpr (!kWarps) {
      return warp;
    } else {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int buffer = kBuffers == 1 ? 0 : round_ % kBuffers;
      leave(buffer, warp, rank * warps_ + static_cast<int>(threadIdx.x) / kWarp, lane);
      Found all = warp.empty();
#pragma unroll 2
      for (int place = lane; place < blocks_ * warps_; place += kWarp) {
        Found other = warp.empty();
        other.for_numbers([&](int k, Number& number) { number = shared_.numbers[buffer][k][place]; });
        all.join(other);
      }
      ++round_;
      return all.over_lanes(kWarp);
    }
  }

 private:
  __device__ void expect(int buffer) {
    cuda::arrive_expecting(&shared_.arrived[buffer], blocks_ * warps_ * kNumbers * static_cast<int>(sizeof(Number)));
  }

  /// Leaves what a warp has found, and waits for the others.
  __device__ void leave(int buffer, Found& warp, int place, int lane) {
    if constexpr (kCluster) {
      if (round_ == 0) {
        cuda::wait_for_cluster();  // all barriers are there
      }
      if (lane < blocks_) {
        warp.for_numbers([&](int k, Number& number) {
          cuda::send(&shared_.numbers[buffer][k][place], lane, number, &shared_.arrived[buffer]);
        });
      }
      cuda::wait(&shared_.arrived[buffer], round_ / kBuffers % 2);
      if (kBuffers > 1 && threadIdx.x == 0) {
        expect(buffer);  // the next but one
      }
    } else {
      if (lane == 0) {
        warp.for_numbers([&](int k, Number& number) { shared_.numbers[buffer][k][place] = number; });
      }
      __syncthreads();
    }
  }

  Shared& shared_;
  int warps_;
  int blocks_;
  int round_ = 0;
};

/// f(i) for i = first, first + step, … below end. Several at a time, so that their loads can be under way at once.
template <int kAtOnce, class F>
__device__ void for_steps(int first, int end, int step, const F& f) {
  int i = first;
  for (; i < end - (kAtOnce - 1) * step; i += kAtOnce * step) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      f(i + k * step);
    }
  }
#pragma unroll 1
  for (; i < end; i += step) {
    f(i);
  }
}

/// A piece of memory that a block works on, and its image in shared memory, which begins at the same distance from a
/// unit of 16 bytes. Whole units are copied 16 bytes at a time, the few elements before and after them, its edges, one
/// by one.
template <class T>
class StagedPiece {
 public:
  static constexpr int kUnit = 16 / sizeof(T);

  __device__ StagedPiece(unsigned char* memory, const T* from, int count) {
    const int phase = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16 / sizeof(T));
    image_ = reinterpret_cast<T*>(memory) + phase;
    head_ = min(count, phase == 0 ? 0 : kUnit - phase);
    units_ = (count - head_) / kUnit;
    edges_ = count - units_ * kUnit;
  }

  /// Bytes of shared memory for a piece of so many elements.
  __host__ __device__ static constexpr int bytes(int count) { return ((count + 2 * kUnit - 1) / kUnit) * 16; }

  __device__ T* image() const { return image_; }

  /// Starts the copies from memory, which cuda::wait_copies() and a barrier await.
  __device__ void fetch(const T* from) const {
    for_units([&](int i) { cuda::copy_async<16, /*kLastInL2=*/true>(image_ + i, from + i); });
    for_edges([&](int i) { image_[i] = from[i]; });
    cuda::commit_copies();
  }

  /// Copies the image to memory at the same distance from a unit. A barrier precedes it.
  __device__ void write(T* to) const {
    for_units([&](int i) { rows::store(to + i, rows::load<kUnit>(image_ + i)); });
    for_edges([&](int i) { to[i] = image_[i]; });
  }

  /// Calls f(i) for the first elements i of a thread's units.
  template <int kAtOnce = 4, class F>
  __device__ void for_units(const F& f) const {
    for_steps<kAtOnce>(head_ + thread() * kUnit, head_ + units_ * kUnit,
                       static_cast<int>(blockDim.x * blockDim.y) * kUnit, f);
  }
  /// Calls f(i) for a thread's element of the edges, if it has one: there are fewer than threads.
  template <class F>
  __device__ void for_edges(const F& f) const {
    const int e = thread();
    if (e < edges_) {
      f(e < head_ ? e : e + units_ * kUnit);
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

  T* image_;
  int head_;   // elements before the first whole unit
  int units_;  // whole ones
  int edges_;  // elements before and after them
};

/// Elements that share a word of shared memory, or one that is wider.
template <class T>
constexpr int kInWord = sizeof(T) == 2 ? 2 : 1;

/// A row that begins anywhere in an image, by words: the elements from an even column on, put together from two words
/// of shared memory where the row begins in the middle of one. The second element may be past the row's end.
template <class T>
class RowWords {
 public:
  __device__ explicit RowWords(const T* row) {
    if constexpr (kInWord<T> == 2) {
      in_middle_ = cuda::shared_address(row) % 4 != 0;
      row_ = row - (in_middle_ ? 1 : 0);
    } else {
      row_ = row;
    }
  }

  __device__ bool in_middle() const { return in_middle_; }

  /// kMaybe: whether the row may begin in the middle of a word.
  template <bool kMaybe>
  __device__ Pack<T, kInWord<T>> at(int column) const {
    if constexpr (kInWord<T> == 1 || !kMaybe) {
      return rows::load<kInWord<T>>(row_ + column);
    } else {
      const unsigned* const word = reinterpret_cast<const unsigned*>(row_ + column);
      const unsigned both = __funnelshift_r(word[0], word[1], in_middle_ ? 16 : 0);
      return reinterpret_cast<const Pack<T, 2>&>(both);
    }
  }

 private:
  const T* row_;
  bool in_middle_ = false;
};

}  // namespace mica::kernels::held
