#pragma once

// What a thread that holds rows has of them: its place, its packs, weight and bias; and where a row's threads meet.

#include <algorithm>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/ops/detail/row_team_cuda.cuh>
#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_cuda.cuh>

namespace mica::kernels::norm_cuda {

// Blocks of a grid: one for each row, or for each of its teams; the same, but few enough that all have room at a time;
// or as many as have room, whose teams have row after row.
enum class Blocks { many, few, stay };

// Where weight and bias are when y is written.
enum class ParametersIn { memory, shared, registers };

// What a kernel is compiled for. A thread has P packs of V columns; those of kLanes lanes lie one after another.
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
  static constexpr bool kStays = kBlocks_ == Blocks::stay;
  static constexpr bool kFew = kBlocks_ == Blocks::few;
  static constexpr bool kAdds = N::kSource != Source::x;
  static constexpr int kStep = kLanes * V;                            // columns from one pack of a thread to the next
  static constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row that a thread holds

  // The parameters lie in shared memory: float ones of 16-bit rows. Then a block has several rows at once, also where
  // more than a warp shares one.
  static constexpr bool kShares = kStays && N::kCentered && sizeof(T) == 2 && sizeof(W) == 4;

  // Few blocks leave registers to read them before the moments, while x is on its way.
  static constexpr ParametersIn kParameters = kShares ? ParametersIn::shared
                                              : kFew  ? ParametersIn::registers
                                                      : ParametersIn::memory;

  // Threads of a block, at most.
  static constexpr int kMostThreads = kTeam != RowTeam::block ? kForwardBlock / 2
                                      : kShares               ? kSharingBlock
                                                              : kForwardBlock;

  // Blocks of so many that a multiprocessor has room for: as many as possible such that nothing is spilled.
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
    if (V == 1) {
      return kTeam == RowTeam::block ? 2 : 3;
    }
    if (kTeam == RowTeam::block) {
      return kShares ? 1 : !kStays && sizeof(T) == 2 ? 3 : 2;
    }
    if (kStays) {
      return kLanes == kWarp && kBytes <= 16 ? 5 : kBytes <= 48 ? 4 : 3;
    }
    if (kLanes < kWarp) {
      return 3;
    }
    return kBytes <= 16 ? 8 : kBytes <= 32 || (sizeof(T) == 4 && kBytes <= 64) ? 6 : 4;
  }();

  // Whether x may be told to stay in the L2 cache longest. What is written then leaves it in the order in which it
  // came, which suits memory. Rows on their way while others are written gain nothing.
  static constexpr bool kKeepsInL2 =
      sizeof(Pack<T, V>) == 16 && !kFew &&
      (kAdds || (kStays           ? kShares
                 : sizeof(T) == 2 ? kTeam == RowTeam::block
                                  : sizeof(T) == 4 && (P == 8 || (kTeam != RowTeam::block && P == 4))));
};

// Where the warps of a team meet: all of a block's or, if kSeveral, those that have one of its rows.
template <class S, bool kSeveral>
class TeamMeeting {
 public:
  __device__ explicit TeamMeeting(Moments<S>* moments) : moments_(moments + (kSeveral ? threadIdx.y * warps() : 0)) {}

  /// Leaves a warp's moments, a in its lower 16 lanes and b in the upper ones, and waits for those of the others.
  __device__ void meet(S mine) const {
    const int lane = threadIdx.x % kWarp;
    if (lane % (kWarp / 2) == 0) {
      Moments<S>& own = moments_[threadIdx.x / kWarp];
      (lane == 0 ? own.a : own.b) = mine;
    }
    if constexpr (kSeveral) {
      cuda::barrier_sync(1 + threadIdx.y, blockDim.x);
    } else {
      __syncthreads();
    }
  }

  /// The sums of both numbers.
  __device__ Moments<S> sum() const {
    const int lane = threadIdx.x % kWarp;
    S sum = 0;
    if (lane % (kWarp / 2) < warps()) {
      const Moments<S>& other = moments_[lane % (kWarp / 2)];
      sum = lane < kWarp / 2 ? other.a : other.b;
    }
    sum = sum_lanes<kWarp / 2>(sum);
    return {__shfl_sync(kAllLanes, sum, 0), __shfl_sync(kAllLanes, sum, kWarp / 2)};
  }

  /// The moments of all elements; `count` of them are those of warp number `lane`.
  __device__ Moments<S> combine(S count, S reciprocal_n) const {
    const int lane = threadIdx.x % kWarp;
    const Moments<S> mine = lane < warps() ? moments_[lane] : Moments<S>{0, 0};
    return combine_lanes<kWarp>(mine, lane < warps() ? count : S(0), reciprocal_n);
  }

 private:
  __device__ static int warps() { return blockDim.x / kWarp; }

  Moments<S>* moments_;
};

// A team's row, and the thread's packs of it.
template <class H>
struct Place {
  using S = typename H::S;
  static constexpr int V = H::V;
  static constexpr int P = H::P;
  static constexpr RowTeam kTeam = H::kTeam;

  // A block's number is an int.
  std::conditional_t<kTeam == RowTeam::block, int, std::int64_t> row;
  bool present;  // else, blocks ask for nothing, and lanes have no columns
  int first;     // column
  int columns;

  __device__ Place(const NormForwardPlan& p, std::int64_t rows, std::int64_t row_columns, int lane, int block)
      : row(kTeam == RowTeam::block ? (H::kShares ? block * p.teams + static_cast<int>(threadIdx.y) : block)
                                    : std::int64_t{block} * p.teams + threadIdx.y),
        present(row < rows),
        first((lane / H::kLanes * (P * H::kLanes) + lane % H::kLanes) * V),
        columns(kTeam == RowTeam::block || present ? static_cast<int>(row_columns) : 0) {}

  __device__ bool has(int i) const { return first + i * H::kStep < columns; }

  __device__ int elements() const {
    const int packs = (columns - first + H::kStep - 1) / H::kStep;
    return V * max(0, min(P, packs));
  }

  /// The moments of the row from those of the thread's elements: the same bits in each thread.
  __device__ Moments<S> combine(const Moments<S>& mine, S in_row, Moments<S>* moments) const {
    const S count = static_cast<S>(elements());
    if constexpr (kTeam != RowTeam::block) {
      return combine_lanes<H::kLanes>(mine, count, in_row);
    } else {
      constexpr int kWarpColumns = P * kWarp * V;
      const S warp_count = static_cast<S>(__reduce_add_sync(kAllLanes, elements()));
      const Moments<S> warp = combine_lanes<kWarp>(mine, count, reciprocal(warp_count));
      const TeamMeeting<S, H::kShares> meeting(moments);
      const int lane = threadIdx.x % kWarp;
      meeting.meet(lane < kWarp / 2 ? warp.a : warp.b);
      const int left = columns - lane * kWarpColumns;
      return meeting.combine(static_cast<S>(max(0, min(kWarpColumns, left))), in_row);
    }
  }

  /// The sums of both numbers over the row; not kBoth: the first one need not be.
  template <bool kBoth>
  __device__ Moments<S> sum(const Moments<S>& mine, Moments<S>* moments) const {
    if constexpr (H::kLanes < kWarp) {
      return {kBoth ? sum_lanes<H::kLanes>(mine.a) : mine.a, sum_lanes<H::kLanes>(mine.b)};
    } else {
      const S sums = sum_pair(mine.a, mine.b);
      if constexpr (kTeam == RowTeam::warp) {
        return {__shfl_sync(kAllLanes, sums, 0), __shfl_sync(kAllLanes, sums, kWarp / 2)};
      } else {
        const TeamMeeting<S, H::kShares> meeting(moments);
        meeting.meet(sums);
        return meeting.sum();
      }
    }
  }
};

// A thread's packs of a row, zeros where there are none, and the beginning of the row. What is used of an element is
// its difference from a shift. Packs of 16 bits stay as they were read, which leaves registers to more threads.
template <class H>
class RowPacks {
  using N = typename H::N;
  using T = typename H::T;
  using S = typename H::S;
  static constexpr int V = H::V;
  static constexpr int P = H::P;

 public:
  __device__ void load_from(const T* row, const Place<H>& place, std::uint64_t policy) {
    load_packs<H::kKeepsInL2>(row + place.first, place, policy, packs_);
    if constexpr (N::kCentered && !H::kAdds) {
      first_.set(0, load<kFirst<T, V>>(row));
    }
  }

  /// Makes sums of the packs and writes them. `begin`: of the row.
  __device__ void add(const Addends<T>& a, std::int64_t begin, const Place<H>& place, std::uint64_t policy) {
    Packs residuals;
    load_packs<sizeof(Pack<T, V>) == 16>(a.residual + begin + place.first, place, policy, residuals);
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

  /// The beginning of a row of sums: what the team's first thread has.
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

  /// Makes a shift of the beginning of the row. To be called once.
  __device__ S find_shift(const Place<H>& place) {
    if constexpr (!N::kCentered) {
      return 0;
    }
    shift_ = shift_of(first_.pack(0));
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

  /// The differences of pack number i from the shift; zeros if it is absent.
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

  /// Changes nothing, in a way that the compiler cannot know: it would keep the differences it has found, and spill.
  __device__ void forget() { packs_.forget(); }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, S>;
  using Packs = held::HeldPacks<T, V, P, /*kPacked=*/true>;

  template <bool kPolicy>
  __device__ static void load_packs(const T* from, const Place<H>& place, std::uint64_t policy, Packs& packs) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      packs.set(i, {});
      if (place.has(i)) {
        if constexpr (kPolicy) {
          packs.set(i, load_streaming<V>(from + i * H::kStep, policy));
        } else {
          packs.set(i, load_streaming<V>(from + i * H::kStep));
        }
      }
    }
  }

  Packs packs_;
  held::HeldPacks<T, kFirst<T, V>, 1, /*kPacked=*/true> first_;
  S shift_;
};

// A load that stays one where branches meet after it, after which the compiler would split it; and that stays where it
// is: the compiler took others out of loops over rows, and of the branch that asks whether there is such a column.
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

// Has an array, but for what of its ends does not fill 16 bytes, on its way to the L2 cache. For one thread to call.
// Nothing before compute capability 9.0.
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

// weight and bias of a thread's packs, a part of the columns at a time. Read again for each row: from global memory,
// from which they come to the L1 cache or, where blocks stay, from shared memory.
template <class H, ParametersIn kIn = H::kParameters>
class Parameters {
  using N = typename H::N;
  using W = typename H::W;

 public:
  static constexpr int kBytes = N::kCentered && !H::kAdds ? 8 : 16;  // read at once, as registers allow
  static constexpr int kPart = std::min(H::V, kBytes / static_cast<int>(sizeof(W)));  // columns

  __device__ Parameters(const W* weight, const W* bias, int first, int columns, unsigned char*)
      : weight_(weight == nullptr ? nullptr : weight + first), bias_(bias == nullptr ? nullptr : bias + first) {
    if (blockIdx.x == 0 && threadIdx.x + threadIdx.y == 0) {
      // For all blocks. Where y is written they are read pack after pack, each time from memory if they are not there.
      prefetch_to_l2(weight, columns);
      prefetch_to_l2(bias, columns);
    }
  }

  static int bytes(int) { return 0; }  // of shared memory

  __device__ bool both() const { return (weight_ != nullptr) && (!N::kCentered || bias_ != nullptr); }

  /// Those of pack number i from its column `part` on. kBoth: neither is absent.
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

// In shared memory, 32 packs of V take V / kPart runs of 32 parts, so that lanes next to each other read parts next to
// each other. A part has 16 bytes.
template <class H>
class Parameters<H, ParametersIn::shared> {
  using W = typename H::W;
  static constexpr int V = H::V;

 public:
  static constexpr int kPart = 16 / sizeof(W);

  __device__ Parameters(const W* weight, const W* bias, int first, int columns, unsigned char* memory)
      : weight_(reinterpret_cast<W*>(memory) + place(first)), bias_(weight_ + padded(columns)) {
    W* const shared = reinterpret_cast<W*>(memory);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int step = blockDim.x * blockDim.y * kPart;
#pragma unroll 1
    for (int column = thread * kPart; column < columns; column += step) {
      store(shared + place(column), load_or<kPart>(weight, column, 1));
      store(shared + padded(columns) + place(column), load_or<kPart>(bias, column, 0));
    }
  }

  static int bytes(int columns) { return 2 * padded(columns) * static_cast<int>(sizeof(W)); }

  __device__ bool both() const { return true; }

  template <bool, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart]) const {
    const int from = i * H::kStep + part / kPart * (kWarp * kPart);
    unpack(load<kPart>(weight_ + from), w);
    unpack(load<kPart>(bias_ + from), b);
  }

 private:
  static __host__ __device__ int padded(int columns) { return (columns + kWarp * V - 1) / (kWarp * V) * (kWarp * V); }

  // Where the part from `column` on lies.
  __device__ static int place(int column) {
    const int pack = column / V;
    return pack / kWarp * (kWarp * V) + column % V / kPart * (kWarp * kPart) + pack % kWarp * kPart;
  }

  const W* weight_;
  const W* bias_;
};

// Of few blocks, which have one row each. Neither is absent.
template <class H>
class Parameters<H, ParametersIn::registers> {
  using W = typename H::W;

 public:
  static constexpr int kPart = H::V;

  __device__ Parameters(const W* weight, const W* bias, int first, int columns, unsigned char*)
      : kept_(present(weight), H::N::kCentered ? present(bias) : nullptr, first,
              (columns - first + H::kStep - 1) / H::kStep, /*is_cut=*/false) {}

  static int bytes(int) { return 0; }

  __device__ bool both() const { return true; }

  template <bool, class S>
  __device__ void at(int i, int, S (&w)[kPart], S (&b)[kPart]) const {
    kept_.at(i, 0, w, b);
  }

 private:
  // Known to be so, that no load waits for a branch.
  __device__ static const W* present(const W* parameter) {
    __builtin_assume(parameter != nullptr);
    return parameter;
  }

  KeptParameters<W, H::V, H::P, H::kStep, /*kAtOnce=*/true> kept_;
};

}  // namespace mica::kernels::norm_cuda
