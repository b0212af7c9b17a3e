#pragma once

// The parts of the kernel for held rows: a thread's place in a row, its packs of the row, its weight and bias, and the
// exchange of moments between the warps of a row.

#include <algorithm>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/detail/row_team_cuda.cuh>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
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

// A thread's packs of a row. Columns are counted from the beginning of the row's first pack.
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

// Combines the moments of a team's threads into those of their row, with the same bits in each thread. This template
// serves teams of one warp or a part of it.
template <class H, RowTeam kTeam = H::kTeam>
class TeamMeeting {
  using S = typename H::S;

 public:
  struct Shared {};

  __device__ TeamMeeting(Shared&, const NormForwardPlan&) {}

  /// Returns the sums of both numbers. If not kBoth, the first sum is not needed, and may be missing.
  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, const Place<H>&) const {
    if constexpr (H::kLanes < kWarp) {
      return {kBoth ? sum_lanes<H::kLanes>(mine.a) : mine.a, sum_lanes<H::kLanes>(mine.b)};
    } else {
      const S sums = sum_pair(mine.a, mine.b);
      return {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2)};
    }
  }

  /// Combines moments of two passes.
  __device__ Moments<S> combine(const Moments<S>& mine, const Place<H>& place, S in_row) const {
    return combine_lanes<H::kLanes>(mine, static_cast<S>(place.elements()), in_row);
  }
};

// A warp's moments of two passes.
template <class H, class S = typename H::S>
__device__ Moments<S> combine_warp(const Moments<S>& mine, const Place<H>& place) {
  const S count = static_cast<S>(place.elements());
  const S warp_count = static_cast<S>(__reduce_add_sync(kAllLanes, place.elements()));
  return combine_lanes<kWarp>(mine, count, reciprocal(warp_count));
}

// The same for the warps that share one of the block's rows: all its warps or, if kShares, some of them.
template <class H>
class TeamMeeting<H, RowTeam::block> {
  using S = typename H::S;

 public:
  struct Shared {
    Moments<S> moments[H::kStays ? 2 : 1][H::kMostThreads / kWarp];  // rows take turns
  };

  __device__ TeamMeeting(Shared& shared, const NormForwardPlan&)
      : shared_(shared), first_(H::kShares ? threadIdx.y * warps() : 0) {}

  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, const Place<H>&) {
    const Moments<S>* const all = meet(sum_pair(mine.a, mine.b));
    const int lane = threadIdx.x % kWarp;
    S sum = 0;
    if (lane % (kWarp / 2) < warps()) {
      const Moments<S>& other = all[lane % (kWarp / 2)];
      sum = lane < kWarp / 2 ? other.a : other.b;
    }
    sum = sum_lanes<kWarp / 2>(sum);
    return {__shfl_sync(kAllLanes, sum, 0), __shfl_sync(kAllLanes, sum, kWarp / 2)};
  }

  __device__ Moments<S> combine(const Moments<S>& mine, const Place<H>& place, S in_row) {
    constexpr int kWarpColumns = H::P * kWarp * H::V;
    const Moments<S> warp = combine_warp<H>(mine, place);
    const int lane = threadIdx.x % kWarp;
    const Moments<S>* const all = meet(lane < kWarp / 2 ? warp.a : warp.b);
    const Moments<S> other = lane < warps() ? all[lane] : Moments<S>{0, 0};
    const int count = lane < warps() ? max(0, min(kWarpColumns, place.columns - lane * kWarpColumns)) : 0;
    return combine_lanes<kWarp>(other, static_cast<S>(count), in_row);
  }

 private:
  __device__ static int warps() { return blockDim.x / kWarp; }

  // Leaves a warp's moments, and returns those of all warps. `mine` is a in the lower 16 lanes and b in the upper ones.
  __device__ const Moments<S>* meet(S mine) {
    Moments<S>* const all = shared_.moments[turn_] + first_;
    const int lane = threadIdx.x % kWarp;
    if (lane % (kWarp / 2) == 0) {
      Moments<S>& own = all[threadIdx.x / kWarp];
      (lane == 0 ? own.a : own.b) = mine;
    }
    if constexpr (H::kShares) {
      cuda::barrier_sync(1 + threadIdx.y, blockDim.x);
    } else {
      __syncthreads();
    }
    if constexpr (H::kStays) {
      turn_ ^= 1;
    }
    return all;
  }

  Shared& shared_;
  const int first_;
  int turn_ = 0;
};

// The moments of a warp's part of a row, which the warps of a cluster exchange: of one pass, `sum` and `squares` are
// sums over the elements; of two passes, they are the mean of `count` elements and Σ (x − mean)².
template <class S, bool kTwoPasses>
struct WarpMoments {
  static constexpr int kNumbers = kTwoPasses ? 3 : 2;

  S sum;
  S squares;
  S count;  // only of two passes

  __device__ static WarpMoments empty() { return {0, 0, 0}; }

  template <class F>
  __device__ void for_numbers(const F& f) {
    f(0, sum);
    f(1, squares);
    if constexpr (kTwoPasses) {
      f(2, count);
    }
  }

  template <class Read>
  __device__ static WarpMoments of_places(int n, const Read& read) {
    WarpMoments all = empty();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 2
    for (int place = lane; place < n; place += kWarp) {
      const WarpMoments warp = read(place);
      all.sum += kTwoPasses ? warp.count * warp.sum : warp.sum;
      kTwoPasses ? all.count += warp.count : all.squares += warp.squares;
    }
    all.sum = sum_lanes<kWarp>(all.sum);
    if constexpr (kTwoPasses) {  // Chan's formula
      all.sum *= reciprocal(sum_lanes<kWarp>(all.count));
#pragma unroll 2
      for (int place = lane; place < n; place += kWarp) {
        const WarpMoments warp = read(place);
        const S difference = warp.sum - all.sum;
        all.squares += fma(warp.count * difference, difference, warp.squares);
      }
    }
    all.squares = sum_lanes<kWarp>(all.squares);
    return all;
  }
};

// The same for the warps of a cluster.
template <class H>
class TeamMeeting<H, RowTeam::cluster> {
  using S = typename H::S;
  using Part = WarpMoments<S, H::N::kCentered && !kOnePass<typename H::T, H::V>>;
  using Exchange = held::Exchange<Part, held::Team::cluster, H::kStays ? 2 : 1>;

 public:
  using Shared = typename Exchange::Shared;

  __device__ TeamMeeting(Shared& shared, const NormForwardPlan& p) : exchange_(shared, p.blocks) {}

  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, const Place<H>& place) {
    const S sums = sum_pair(mine.a, mine.b);
    const Part row = exchange_.joined_warps(
        {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2), S(0)}, place.rank);
    return {row.sum, row.squares};
  }

  __device__ Moments<S> combine(const Moments<S>& mine, const Place<H>& place, S in_row) {
    const S count = static_cast<S>(__reduce_add_sync(kAllLanes, place.elements()));
    const Moments<S> warp = combine_warp<H>(mine, place);
    const Part row = exchange_.joined_warps({warp.a, warp.b, count}, place.rank);
    return {row.sum, row.squares};
  }

 private:
  Exchange exchange_;
};

// A thread's packs of a row, with zeros in place of absent packs, and the first elements of the row, from which its
// shift is computed. All computations use the differences of elements from the shift. 16-bit elements stay packed in
// registers, so that more threads fit on a multiprocessor.
template <class H>
class RowPacks {
  using N = typename H::N;
  using T = typename H::T;
  using S = typename H::S;
  static constexpr int V = H::V;
  static constexpr int P = H::P;

 public:
  /// `row` is where the row's first pack begins. If there is no such row, nothing is loaded. is_last: it is the last
  /// row of the matrix.
  __device__ void load_from(const T* row, const Place<H>& place, bool is_large, bool present, bool is_last) {
    // With edges, whole packs are loaded, but nothing past the end of the matrix.
    const int left = present ? place.columns - place.first - (H::kEdges && is_last ? V - 1 : 0) : 0;
    H::kKeepsInL2 || is_large ? load_packs<true>(row + place.first, left, packs_)
                              : load_packs<false>(row + place.first, left, packs_);
    if constexpr (H::kEdges) {
      if (is_last && place.edges) {
        load_cut_pack(row + place.first, place);
      }
    }
    if constexpr (N::kCentered && !H::kAdds) {
      if (present) {
        load_first(row + (H::kEdges ? V : 0));  // from the first pack that is no edge
      }
    }
  }

  /// Replaces the packs by those of the sum, and writes them. `begin` is the index of the row's first element.
  __device__ void add(const Addends<T>& a, std::int64_t begin, const Place<H>& place) {
    Packs residuals;
    load_packs<true>(a.residual + begin + place.first, place.columns - place.first, residuals);
    [[maybe_unused]] const PhiloxKey key = N::kSource == Source::dropped_sum ? absolute_key(a.key) : PhiloxKey{};
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.has(i)) {
        const int column = place.first + i * H::kStep;
        S x[V];
        S sum[V];
        unpack(packs_.pack(i), x);
        unpack(residuals.pack(i), sum);
        if (a.x_bias != nullptr) {
          S bias[V];
          unpack(load<V>(a.x_bias + column), bias);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            x[j] += bias[j];
          }
        }
        if constexpr (N::kSource == Source::dropped_sum) {
          drop_pack(x, begin + column, key, a.threshold, a.scale);
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sum[j] += x[j];
        }
        const Pack<T, V> pack = pack_of<T>(sum);
        store(a.sum + begin + column, pack);
        packs_.set(i, pack);
      }
    }
  }

  /// Gets the first elements of a row of sums from the team's first thread.
  __device__ void share_first() {
    using First = Pack<T, kFirst<T, V>>;
    const Pack<T, V>& mine = packs_.pack(0);
    First first;
    if constexpr (H::kTeam == RowTeam::block) {
      __shared__ First shared;
      if (threadIdx.x == 0) {
        shared = reinterpret_cast<const First&>(mine);
      }
      __syncthreads();
      first = shared;
    } else {
      constexpr int kWords = sizeof(First) / 4;
      static_assert(kWords * 4 == sizeof(First));
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const unsigned word = reinterpret_cast<const unsigned*>(&mine)[i];
        reinterpret_cast<unsigned*>(&first)[i] = __shfl_sync(kAllLanes, word, 0, H::kLanes);
      }
    }
    first_.set(0, first);
  }

  /// Computes the shift from the first elements of the row. Call it once: packs in the type of sums are replaced by
  /// their differences from the shift.
  __device__ S find_shift(const Place<H>& place) {
    shift_ = 0;
    if constexpr (N::kCentered) {
      shift_ = shift_of(first_.pack(0));
    }
    if constexpr (H::kEdges) {
      const T shift = static_cast<T>(shift_);
      shift_ = static_cast<S>(shift);
      if (place.edges) {
        fill_edges(place, shift);
      }
    }
    if constexpr (!N::kCentered) {
      return 0;
    }
    if constexpr (kInPlace) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const S from = place.has(i) ? shift_ : S(0);
        Pack<T, V> pack = packs_.pack(i);
#pragma unroll
        for (T& x : pack.at) {
          x -= from;
        }
        packs_.set(i, pack);
      }
    }
    return shift_;
  }

  /// Returns the differences of pack i from the shift; zeros if the pack is absent.
  __device__ void differences(int i, const Place<H>& place, S (&values)[V]) const {
    unpack(packs_.pack(i), values);
    if constexpr (N::kCentered && !kInPlace) {
      const S from = place.has(i) ? shift_ : S(0);
#pragma unroll
      for (S& value : values) {
        value -= from;
      }
    }
  }

  /// Makes the compiler believe that the packs may have changed. Otherwise it would keep the differences that it has
  /// computed, and spill registers.
  __device__ void forget() { packs_.forget(); }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, S>;
  using Packs = held::HeldPacks<T, V, P, /*kPacked=*/true>;

  // Loads the packs that begin in the next `left` columns. kLast: with the L2 cache policy evict_last. Results then
  // leave the cache in the order in which they were written, which DRAM writes faster.
  template <bool kLast>
  __device__ static void load_packs(const T* from, int left, Packs& packs) {
    [[maybe_unused]] const std::uint64_t policy = cuda::evict_last();
#pragma unroll
    for (int i = 0; i < P; ++i) {
      packs.set(i, {});
      if (i * H::kStep < left) {
        if constexpr (kLast && sizeof(Pack<T, V>) != 8) {
          packs.set(i, load_streaming<V>(from + i * H::kStep, policy));
        } else {
          packs.set(i, load_streaming<V>(from + i * H::kStep));
        }
      }
    }
  }

  __device__ void load_first(const T* from) {
    constexpr int kLoad = std::min(V, kFirst<T, V>);
    Pack<T, kFirst<T, V>> first;
#pragma unroll
    for (int i = 0; i < kFirst<T, V>; i += kLoad) {
      reinterpret_cast<Pack<T, kLoad>&>(first.at[i]) = load<kLoad>(from + i);
    }
    first_.set(0, first);
  }

  // Loads the elements of the pack inside which the matrix ends.
  __device__ void load_cut_pack(const T* from, const Place<H>& place) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.has(i) && place.end_of(i) < V) {
        Pack<T, V> part = {};
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (j < place.end_of(i)) {
            part.at[j] = from[i * H::kStep + j];
          }
        }
        packs_.set(i, part);
      }
    }
  }

  // Sets the elements of the edges that are not in the row to `value`, so that they contribute nothing to the moments.
  __device__ void fill_edges(const Place<H>& place, T value) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (place.has(i) && place.is_edge(i)) {
        Pack<T, V> pack = packs_.pack(i);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          pack.at[j] = j < place.first_of(i) || j >= place.end_of(i) ? value : pack.at[j];
        }
        packs_.set(i, pack);
      }
    }
  }

  Packs packs_;
  held::HeldPacks<T, kFirst<T, V>, 1, /*kPacked=*/true> first_;
  S shift_;
};

// A load that remains one instruction: if branches join after an ordinary load, the compiler splits it. It also
// remains in its place: the compiler moved ordinary loads out of loops over rows, and out of the branch that tests
// whether the column exists.
template <int V, class T>
__device__ Pack<T, V> load_whole(const T* from) {
  Pack<T, V> pack;
  if constexpr (sizeof(pack) == 8) {
    uint2& words = reinterpret_cast<uint2&>(pack);
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from));
  } else if constexpr (sizeof(pack) == 16) {
    uint4& words = reinterpret_cast<uint4&>(pack);
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
  } else {
    pack = load<V>(from);
  }
  return pack;
}

// Starts loading an array into the L2 cache, except for the elements at its ends that do not fill 16 bytes. Call it
// in one thread. Does nothing before compute capability 9.0.
template <class W>
__device__ void prefetch_to_l2(const W* from, std::int64_t count) {
#if __CUDA_ARCH__ >= 900
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(from) + 15) / 16 * 16;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(from + count) / 16 * 16;
  if (from != nullptr && begin < end) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(static_cast<unsigned>(end - begin)));
  }
#endif
}

// weight and bias of a thread's packs, which at() reads again for each row, kPart columns at a time. This template
// reads them from global memory, through the L1 cache; its specializations read them from shared memory or keep them
// in registers.
template <class H, ParametersIn kIn = H::kParameters>
class Parameters {
  using N = typename H::N;
  using W = typename H::W;

 public:
  static constexpr int kBytes = N::kCentered && !H::kAdds ? 8 : 16;                   // per read, limited by registers
  static constexpr int kPart = std::min(H::V, kBytes / static_cast<int>(sizeof(W)));  // columns

  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char*)
      : weight_(a.weight == nullptr ? nullptr : a.weight + place.first),
        bias_(a.bias == nullptr ? nullptr : a.bias + place.first) {
    if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0) {
      // Prefetches for all blocks. y is computed pack by pack, and without the prefetch, each pack would wait for
      // DRAM to deliver its parameters.
      prefetch_to_l2(a.weight, a.columns);
      prefetch_to_l2(a.bias, a.columns);
    }
  }

  static int bytes(int) { return 0; }  // of shared memory

  __device__ bool both() const { return (weight_ != nullptr) && (!N::kCentered || bias_ != nullptr); }

  /// Returns weight and bias of pack i, kPart columns from its column `part` on. kBoth: they are known to be present.
  template <bool kBoth, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart]) const {
    const int column = i * H::kStep + part;
    unpack(kBoth ? load_whole<kPart>(weight_ + column) : load_or<kPart>(weight_, column, 1), w);
    if constexpr (N::kCentered) {
      unpack(kBoth ? load_whole<kPart>(bias_ + column) : load_or<kPart>(bias_, column, 0), b);
    }
  }

 private:
  const W* weight_;
  const W* bias_;
};

// weight and bias in shared memory. With edges and 3 packs, they are kept as floats, which need no conversion for each
// row. With 4 packs, that is slower.
template <class H>
using SharedParametersOf = SharedParameters<typename H::W, H::V, kWarp, H::N::kCentered, H::kEdges,
                                            std::conditional_t<H::kEdges && H::P == 3, float, typename H::W>>;
template <class H>
class Parameters<H, ParametersIn::shared> : public SharedParametersOf<H> {
  using W = typename H::W;

 public:
  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char* memory)
      : SharedParametersOf<H>(of_slab(a.weight, place), of_slab(a.bias, place), place.first - place.slab,
                              place.columns - place.slab - cut(place), memory, cut(place)) {}

 private:
  // Elements of the slab's first pack that are before the row.
  __device__ static int cut(const Place<H>& place) { return place.rank == 0 ? place.phase : 0; }
  __device__ static const W* of_slab(const W* parameter, const Place<H>& place) {
    return parameter == nullptr ? nullptr : parameter + (place.slab - place.phase + cut(place));
  }
};

// weight and bias in registers. With few blocks, each team of which has one row, both must be present.
template <class H>
class Parameters<H, ParametersIn::registers> {
  using W = typename H::W;

 public:
  static constexpr int kPart = H::V;

  __device__ Parameters(const Forward<typename H::T, W>& a, const Place<H>& place, unsigned char*)
      : kept_(expected(a.weight), H::N::kCentered ? expected(a.bias) : nullptr, place.first, place.packs(),
              /*is_cut=*/false) {}

  static int bytes(int) { return 0; }

  __device__ bool both() const { return true; }

  template <bool, class S>
  __device__ void at(int i, int, S (&w)[kPart], S (&b)[kPart]) const {
    kept_.at(i, H::kStays ? held::opaque(0) : 0, w, b);
  }

 private:
  // Tells the compiler that a parameter is present, so that no load waits for a branch.
  __device__ static const W* expected(const W* parameter) {
    if constexpr (H::kFew) {
      __builtin_assume(parameter != nullptr);
    }
    return parameter;
  }

  KeptParameters<W, H::V, H::P, H::kStep, /*kAtOnce=*/(H::V >= 4)> kept_;
};

}  // namespace mica::kernels::norm_cuda
