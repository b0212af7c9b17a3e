#pragma once

// Parts of kernels that read each row from global memory only once and hold it in registers:
//
//     global memory ──▶ registers ──▶ sums over the row
//                       registers ──▶ results           ──▶ global memory
//
// The threads that share a row are called a team: some lanes of a warp, a whole warp, a thread block, or a cluster of
// blocks. In a cluster, each block has a slab of the row's columns.
//
// Which thread has which columns, and the order of sums, depend on the row's length and on the alignment of pointers.

#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/dtype.h>
#include <mica/ops/detail/row_team.h>
#include <mica/ops/detail/rows_cuda.cuh>

namespace mica::kernels::held {

using rows::kAllLanes;
using rows::kWarp;
using rows::Pack;

/// `Found` is the type of what a reduction over a row computes, for example a maximum and a sum (SumExp). It has
///     Found empty() const;                // the neutral element
///     void join(const Found&);            // combines the results of two parts of the row
///     Found over_lanes(int lanes) const;  // combines those of neighboring lanes, with the same bits in each lane
///     kNumbers and for_numbers(f)         // calls f(k, number) for each of its numbers, floats or doubles
/// One of the numbers is a member called `sum`. Instead of join(), there may be
///     static Found of_places(int n, read)  // combines read(0) to read(n − 1), with the same bits in each lane
template <class Found>
using NumberOf = decltype(Found::sum);

/// The row that a block or a group of its threads works on, and the columns of it that they have.
template <Team kTeam>
struct Place {
  std::int64_t row;
  std::int64_t begin;  // the first column
  int columns;         // how many; 0: the thread has no row
  int rank;            // the block's rank in its cluster

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

/// The P packs of a row that a thread holds in registers, V columns each. If kPacked, they stay in the dtype they were
/// read in, which takes half the registers for 16-bit elements. Otherwise they are converted to the type of sums, and
/// may be replaced by computed values.
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

  /// Makes the compiler believe that the packs may have changed. Otherwise it would keep the elements that were
  /// unpacked for a sum in registers until they are used again, instead of unpacking them again.
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
  // 16-bit elements are kept as 32-bit words, since the compiler would unpack single elements right after loading them.
  using Narrow = std::conditional_t<V == 8, uint4, std::conditional_t<V == 4, uint2, unsigned>>;
  using Word =
      std::conditional_t<!kPacked, Pack<S, V>, std::conditional_t<sizeof(T) == 2 && V != 1, Narrow, Pack<T, V>>>;
  static_assert(!kPacked || sizeof(Word) == sizeof(Pack<T, V>));

  Word held_[P];
};

/// Combines the results of a team's warps through shared memory: each warp stores its own, then all read those of all
/// warps. It can be used once, or any number of times with two buffers, which take turns.
///
/// In a cluster, each warp sends its result into the shared memory of every block, where an mbarrier counts the
/// arriving bytes. So a block waits only for these numbers. A cluster barrier would also wait until the other blocks'
/// writes to global memory are visible.
///
/// joined() waits for the other warps at once. With leave() and take(), a warp may instead leave its result for the
/// next row before it takes that of this row. This needs four buffers: a warp leaves its result for row r + 4 after it
/// has taken row r + 2. Then all warps have left their results for row r + 2 and have therefore taken row r.
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

  /// @param blocks  the number of blocks that share a row.
  /// Construct it before loads from global memory are issued: in a cluster, the constructor would wait for them.
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

  /// The team's result from those of its threads, with the same bits in all threads. rank: that of the block in its
  /// cluster.
  __device__ Found joined(const Found& mine, int rank) { return joined_warps(mine.over_lanes(kWarp), rank); }

  /// The same, for results that are already combined over a warp, or over the lanes that share a row.
  __device__ Found joined_warps(Found warp, int rank) {
    if constexpr (!kWarps) {
      return warp;
    } else {
      leave(warp, rank);
      return take(warp);
    }
  }

  /// Gives a warp's result to the other warps.
  __device__ void leave(Found warp, int rank) {
    static_assert(kWarps);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int place = rank * warps_ + static_cast<int>(threadIdx.x) / kWarp;
    const int buffer = buffer_of(left_);
    if constexpr (kCluster) {
      if (left_ == 0) {
        cuda::wait_for_cluster();  // until all blocks have initialized their barriers
      }
      if (lane < blocks_) {
        warp.for_numbers([&](int k, Number& number) {
          cuda::send(&shared_.numbers[buffer][k][place], lane, number, &shared_.arrived[buffer]);
        });
      }
    } else if (lane == 0) {
      warp.for_numbers([&](int k, Number& number) { shared_.numbers[buffer][k][place] = number; });
    }
    ++left_;
  }

  /// Waits for the results of all warps and combines them. `warp` is what this warp has left.
  __device__ Found take(const Found& warp) {
    static_assert(kWarps);
    const int buffer = buffer_of(taken_);
    if constexpr (kCluster) {
      cuda::wait(&shared_.arrived[buffer], taken_ / kBuffers % 2);
      if (kBuffers > 1 && threadIdx.x == 0) {
        expect(buffer);  // for the next use of this buffer
      }
    } else {
      __syncthreads();
    }
    ++taken_;
    const auto read = [&](int place) {
      Found other = warp.empty();
      other.for_numbers([&](int k, Number& number) { number = shared_.numbers[buffer][k][place]; });
      return other;
    };
    const int places = blocks_ * warps_;
    if constexpr (requires { Found::of_places(places, read); }) {
      return Found::of_places(places, read);
    } else {
      Found all = warp.empty();
#pragma unroll 2
      for (int place = static_cast<int>(threadIdx.x) % kWarp; place < places; place += kWarp) {
        all.join(read(place));
      }
      return all.over_lanes(kWarp);
    }
  }

 private:
  __device__ void expect(int buffer) {
    cuda::arrive_expecting(&shared_.arrived[buffer], blocks_ * warps_ * kNumbers * static_cast<int>(sizeof(Number)));
  }

  __device__ static int buffer_of(int round) { return kBuffers == 1 ? 0 : round % kBuffers; }

  Shared& shared_;
  int warps_;
  int blocks_;
  int left_ = 0;   // rounds in which this warp has left its result
  int taken_ = 0;  // rounds whose results it has taken
};

}  // namespace mica::kernels::held
