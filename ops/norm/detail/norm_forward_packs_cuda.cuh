#pragma once

// What a thread that holds rows has of them, and of weight and bias.

#include <algorithm>
#include <type_traits>

#include <mica/ops/dropout/detail/drop_pack_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_team_cuda.cuh>

namespace mica::kernels::norm_cuda {

// A thread's packs of a row, zeros where there are none, and the beginning of the row. What is used of an element is
// its difference from a shift. Packs of 16 bits stay as they were read, which leaves registers to more threads.
template <class N, class T, int V, int P, int kLanes>
class RowPacks {
 public:
  using S = Accumulate<T>;

  /// kPolicy: the loads follow `policy` for the L2 cache.
  template <bool kPolicy>
  __device__ void load_from(const T* row, std::int64_t at, const Share<V, P, kLanes>& share, std::uint64_t policy) {
    load_packs<kPolicy>(row + at, share, policy, packs_);
    if constexpr (N::kCentered && N::kSource == Source::x) {
      const First first = load<kFirst<T, V>>(row);
      first_ = reinterpret_cast<const Words<First>&>(first);
    }
  }

  /// Makes sums of the packs and writes them. `begin`: of the row; `at`: the thread's first column.
  __device__ void add(const Addends<T>& a, std::int64_t begin, int at, const Share<V, P, kLanes>& share,
                      std::uint64_t policy) {
    Held residuals[P];
    load_packs<sizeof(Pack<T, V>) == 16>(a.residual + begin + at, share, policy, residuals);
    [[maybe_unused]] const PhiloxKey key = N::kSource == Source::dropped_sum ? absolute_key(a.key) : PhiloxKey{};
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (share.has(i)) {
        const int column = at + i * (kLanes * V);
        S x[V];
        S sum[V];
        unpack(reinterpret_cast<const Pack<T, V>&>(packs_[i]), x);
        unpack(reinterpret_cast<const Pack<T, V>&>(residuals[i]), sum);
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
        packs_[i] = reinterpret_cast<const Held&>(pack);
      }
    }
  }

  /// The beginning of a row of sums: what the team's first thread has.
  template <RowTeam kTeam>
  __device__ void share_first() {
    const Pack<T, V>& mine = reinterpret_cast<const Pack<T, V>&>(packs_[0]);
    First first;
    if constexpr (kTeam == RowTeam::block) {
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
        reinterpret_cast<unsigned*>(&first)[i] = __shfl_sync(kAllLanes, word, 0, kLanes);
      }
    }
    first_ = reinterpret_cast<const Words<First>&>(first);
  }

  /// Makes a shift of the beginning of the row. To be called once.
  __device__ S find_shift(const Share<V, P, kLanes>& share) {
    if constexpr (!N::kCentered) {
      return 0;
    }
    shift_ = shift_of(reinterpret_cast<const First&>(first_));
    if constexpr (kInPlace) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const S from = share.has(i) ? shift_ : S(0);
#pragma unroll
        for (T& x : reinterpret_cast<Pack<T, V>&>(packs_[i]).at) {
          x -= from;
        }
      }
    }
    return shift_;
  }

  /// The differences of pack number i from the shift; zeros if it is absent.
  __device__ void differences(int i, const Share<V, P, kLanes>& share, S (&values)[V]) const {
    unpack(reinterpret_cast<const Pack<T, V>&>(packs_[i]), values);
    if constexpr (N::kCentered && !kInPlace) {
      const S from = share.has(i) ? shift_ : S(0);
#pragma unroll
      for (S& value : values) {
        value -= from;
      }
    }
  }

  /// Changes nothing, in a way that the compiler cannot know: it would keep the differences it has found, and spill.
  __device__ void forget() {
    if constexpr (!kInPlace && std::is_same_v<Held, uint4>) {
      const unsigned zero = threadIdx.z;
#pragma unroll
      for (Held& words : packs_) {
        words = make_uint4(words.x | zero, words.y | zero, words.z | zero, words.w | zero);
      }
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<T, S>;
  // Words, where it is 16 bytes: the compiler would take elements of 16 bits apart as soon as they are there, and wait.
  template <class Any>
  using Words = std::conditional_t<sizeof(Any) == 16 && sizeof(T) == 2, uint4, Any>;
  using First = Pack<T, kFirst<T, V>>;
  using Held = Words<Pack<T, V>>;

  template <bool kPolicy>
  __device__ static void load_packs(const T* from, const Share<V, P, kLanes>& share, std::uint64_t policy,
                                    Held (&packs)[P]) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      packs[i] = {};
      if (share.has(i)) {
        Pack<T, V> pack;
        if constexpr (kPolicy) {
          pack = load_streaming<V>(from + i * (kLanes * V), policy);
        } else {
          pack = load_streaming<V>(from + i * (kLanes * V));
        }
        packs[i] = reinterpret_cast<const Held&>(pack);
      }
    }
  }

  Held packs_[P];
  Words<First> first_;
  S shift_;
};

// A load that stays one where branches meet after it, after which the compiler would split it.
template <int V, class T>
__device__ Pack<T, V> load_whole(const T* from) {
  Pack<T, V> pack;
  if constexpr (sizeof(pack) == 8) {
    uint2& words = reinterpret_cast<uint2&>(pack);
    asm("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from));
  } else if constexpr (sizeof(pack) == 16) {
    uint4& words = reinterpret_cast<uint4&>(pack);
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
        : "l"(from));
  } else {
    pack = load<V>(from);
  }
  return pack;
}

// weight and bias of a thread's packs, read again for each row: from global memory, from which they come to the L1
// cache or, where blocks stay, from shared memory, as a part of the columns at a time.
template <class N, class W, int V, int kLanes, bool kShared>
class Parameters {
 public:
  static constexpr int kBytes = N::kCentered && N::kSource == Source::x ? 8 : 16;  // read at once, as registers allow
  static constexpr int kPart = std::min(V, kBytes / static_cast<int>(sizeof(W)));  // columns

  __device__ Parameters(const W* weight, const W* bias, std::int64_t at, int, W*)
      : weight_(weight == nullptr ? nullptr : weight + at), bias_(bias == nullptr ? nullptr : bias + at) {}

  __device__ bool both() const { return (weight_ != nullptr) && (!N::kCentered || bias_ != nullptr); }

  /// Those of pack number i from its column `part` on. kBoth: neither is absent.
  template <bool kBoth, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart]) const {
    const int column = i * (kLanes * V) + part;
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
template <class N, class W, int V, int kLanes>
class Parameters<N, W, V, kLanes, true> {
 public:
  static constexpr int kPart = 16 / sizeof(W);

  __device__ Parameters(const W* weight, const W* bias, std::int64_t at, int columns, W* shared)
      : weight_(shared + place(static_cast<int>(at))), bias_(weight_ + padded(columns)) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int step = blockDim.x * blockDim.y * kPart;
#pragma unroll 1
    for (int column = thread * kPart; column < columns; column += step) {
      store(shared + place(column), load_or<kPart>(weight, column, 1));
      if constexpr (N::kCentered) {
        store(shared + padded(columns) + place(column), load_or<kPart>(bias, column, 0));
      }
    }
  }

  static __host__ __device__ int padded(int columns) { return (columns + kWarp * V - 1) / (kWarp * V) * (kWarp * V); }
  static int bytes(int columns) { return (N::kCentered ? 2 : 1) * padded(columns) * static_cast<int>(sizeof(W)); }

  __device__ bool both() const { return true; }

  template <bool, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart]) const {
    const int from = i * (kLanes * V) + part / kPart * (kWarp * kPart);
    unpack(load<kPart>(weight_ + from), w);
    if constexpr (N::kCentered) {
      unpack(load<kPart>(bias_ + from), b);
    }
  }

 private:
  // Where the part from `column` on lies.
  __device__ static int place(int column) {
    const int pack = column / V;
    return pack / kWarp * (kWarp * V) + column % V / kPart * (kWarp * kPart) + pack % kWarp * kPart;
  }

  const W* weight_;
  const W* bias_;
};

}  // namespace mica::kernels::norm_cuda
