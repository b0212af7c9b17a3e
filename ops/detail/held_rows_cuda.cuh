#pragma once

// Rows that their threads hold in registers from the one time they are read until their results are written: P packs of
// V columns a thread, which lie as many packs apart as there are threads to a row.
//
// A block has blockDim.y rows with blockDim.x threads each.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <mica/ops/detail/rows_cuda.cuh>

namespace mica::kernels::rows {

/// Who holds a row: neighboring lanes of a warp, a warp, or a block.
enum class Holder { lanes, warp, block };

constexpr int kHolderLanes = 8;      // that share a row of at most kLanesColumns
constexpr int kHolderWarps = 8;      // of a block whose warps, or lanes, have rows of their own
constexpr int kHolderThreads = 512;  // of a block that shares one, at most

template <Holder kHolder>
constexpr int kSumLanes = kHolder == Holder::lanes  ? kHolderLanes
                          : kHolder == Holder::warp ? kWarp
                                                    : 0;

/// The largest block that a kernel for such rows is launched with.
template <Holder kHolder>
constexpr int kMostHolderThreads = kHolder == Holder::block ? kHolderThreads : kHolderWarps* kWarp;

#if defined(__CUDACC__)

/// A thread's packs of a row as they were read, which takes the fewest registers; zeros where there are none.
template <class T, int V, int P>
class HeldPacks {
 public:
  using S = Accumulate<T>;

  __device__ void load_from(const T* row, int first, int step, int columns, std::uint64_t policy) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      words_[i] = {};
      if (first + i * step < columns) {
        Pack<T, V> pack;
        if constexpr (sizeof(Pack<T, V>) == 16) {
          pack = load_streaming<V>(row + first + i * step, policy);
        } else {
          pack = load<V>(row + first + i * step);
        }
        words_[i] = reinterpret_cast<const Words&>(pack);
      }
    }
  }

  __device__ void values(int i, S (&x)[V]) const { unpack(reinterpret_cast<const Pack<T, V>&>(words_[i]), x); }

  /// Changes nothing, in a way that the compiler cannot know: it would keep what it has unpacked for the sum.
  __device__ void forget() {
    if constexpr (std::is_same_v<Words, uint4>) {
      const unsigned zero = threadIdx.z;
#pragma unroll
      for (Words& w : words_) {
        w = make_uint4(w.x | zero, w.y | zero, w.z | zero, w.w | zero);
      }
    }
  }

 private:
  // Words, where it is 16 bytes of 16-bit elements: the compiler would take those apart as soon as they are there.
  using Words = std::conditional_t<sizeof(T) == 2 && V == 8, uint4, Pack<T, V>>;

  Words words_[P];
};

struct Sum {
  template <class S>
  __device__ S operator()(S a, S b) const {
    return a + b;
  }
};

/// f of all threads of a row, to the same bits in each: over kLanes neighboring lanes or, if that is 0, over the block.
/// `warps` has room for a number of each warp, in shared memory, and is not used again. f(nothing, a) = a.
template <int kLanes, class S, class F = Sum>
__device__ S over_threads(S mine, S* warps, S nothing = 0, F f = {}) {
  const auto over_lanes = [&f](S value, auto lanes) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) {
      value = f(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    return value;
  };
  if constexpr (kLanes > 0) {
    return over_lanes(mine, std::integral_constant<int, kLanes>{});
  } else {
    constexpr std::integral_constant<int, kWarp> all;
    const S warp = over_lanes(mine, all);
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) {
      warps[threadIdx.x / kWarp] = warp;
    }
    __syncthreads();
    return over_lanes(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : nothing, all);
  }
}

#endif

// On the host.

/// Threads of a block that share a row, at most `most_threads`: with `most` packs of V columns each or, if that leaves
/// fewer of them without one, with `fewer`.
template <int V>
int block_threads(std::int64_t columns, int most, int fewer, int most_threads) {
  const auto threads_with = [&](int packs) {
    const std::int64_t in_warp = std::int64_t{kWarp} * V * packs;
    return (columns + in_warp - 1) / in_warp * kWarp;
  };
  const std::int64_t of_most = threads_with(most);
  const std::int64_t of_fewer = threads_with(fewer);
  const bool better = of_fewer <= most_threads && of_fewer * fewer < of_most * most;
  return static_cast<int>(better ? of_fewer : std::min<std::int64_t>(of_most, most_threads));
}

/// Packs of V columns that each of so many threads has.
template <int V>
int packs_of(std::int64_t columns, int threads) {
  return static_cast<int>((columns + threads * V - 1) / (threads * V));
}

/// Packs of a row that a thread holds, at most.
template <int V>
constexpr int kMostHeld = V == 8   ? 4
                          : V == 1 ? 16
                                   : 8;

/// The longest row that some lanes of a warp share: with several packs each, they have more of them under way.
template <int V>
constexpr std::int64_t kLanesColumns = V >= 4   ? 256
                                       : V == 2 ? 128
                                                : 64;

/// Calls f.operator()<P, kHolder>(block), the shape of a block, for rows of so many columns. False, and nothing is
/// called, if they are too long.
template <int V, class F>
bool with_holder(std::int64_t columns, const F& f) {
  constexpr int kMost = kMostHeld<V>;
  const auto with_packs = [&]<Holder kHolder, int... P>(int packs, dim3 block, std::integer_sequence<int, P...>) {
    bool done = false;
    ((done = done || (packs <= P && (f.template operator()<P, kHolder>(block), true))), ...);
  };
  const int in_warp = packs_of<V>(columns, kWarp);
  if (columns <= kLanesColumns<V>) {
    const int packs = packs_of<V>(columns, kHolderLanes);
    const dim3 block(kHolderLanes, kHolderWarps * kWarp / kHolderLanes);
    if constexpr (V == 1) {
      with_packs.template operator()<Holder::lanes>(packs, block, std::integer_sequence<int, 8>{});
    } else if constexpr (V == 2) {
      with_packs.template operator()<Holder::lanes>(packs, block, std::integer_sequence<int, 4, 8>{});
    } else {
      with_packs.template operator()<Holder::lanes>(packs, block, std::integer_sequence<int, 8 / V, 16 / V, 32 / V>{});
    }
  } else if (in_warp <= kMost) {
    const dim3 block(kWarp, kHolderWarps);
    if constexpr (V == 8) {
      with_packs.template operator()<Holder::warp>(in_warp, block, std::integer_sequence<int, 2, 3, 4>{});
    } else {
      with_packs.template operator()<Holder::warp>(in_warp, block,
                                                   std::integer_sequence<int, kMost / 4, kMost / 2, kMost>{});
    }
  } else if (columns <= std::int64_t{kHolderThreads} * V * kMost) {
    const int threads = block_threads<V>(columns, kMost, V == 8 ? 3 : kMost / 2, kHolderThreads);
    const int packs = packs_of<V>(columns, threads);
    if constexpr (V == 8) {
      with_packs.template operator()<Holder::block>(packs, threads, std::integer_sequence<int, 3, 4>{});
    } else {
      with_packs.template operator()<Holder::block>(packs, threads, std::integer_sequence<int, kMost / 2, kMost>{});
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace mica::kernels::rows
