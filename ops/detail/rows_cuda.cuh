#pragma once

// How threads share rows of a matrix (M, N): loading them in packs of 16 bytes, and summing over them in a fixed order.
// V is the number of columns in a pack.

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/dispatch.h>

namespace mica::kernels::rows {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

/// A block of kBlock threads works on kRows rows at once; kThreads share a row, each with kElements of it in registers.
template <int kThreads_, int kBlock_, int kElements_>
struct Layout {
  static constexpr int kThreads = kThreads_;
  static constexpr int kBlock = kBlock_;
  static constexpr int kElements = kElements_;
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kColumns = kThreads * kElements;  // the longest row that fits
  static constexpr int kWarps = kBlock / kWarp;
  static constexpr bool kOneWarp = kThreads <= kWarp;  // or a part of one shares a row: its lanes can sum it alone
  static constexpr int kLanes = kOneWarp ? kThreads : kWarp;
  static_assert(kOneWarp || kRows == 1);
};

template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T at[V];
};

template <int V, class T>
__device__ Pack<T, V> load(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}
template <int V, class T>
__device__ void store(T* to, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

/// A store of 16 bytes that stays one where branches meet before it, after which the compiler would split another.
template <class P>
__device__ void store_whole(void* to, const P& pack) {
  static_assert(sizeof(P) == 16);
  const uint4 bits = reinterpret_cast<const uint4&>(pack);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}

/// A load of what is read once, which leaves the L1 cache to others.
template <int V, class T>
__device__ Pack<T, V> load_streaming(const T* from) {
  if constexpr (sizeof(Pack<T, V>) == 16) {
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
    return *reinterpret_cast<const Pack<T, V>*>(&bits);
  } else {
    return load<V>(from);
  }
}
/// The same, by a policy for the L2 cache.
template <int V, class T>
__device__ Pack<T, V> load_streaming(const T* from, std::uint64_t policy) {
  static_assert(sizeof(Pack<T, V>) == 16);
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from), "l"(policy));
  return *reinterpret_cast<const Pack<T, V>*>(&bits);
}

/// The elements of a pack as the type of their sums.
template <class T, int V, class S>
__device__ void unpack(const Pack<T, V>& pack, S (&values)[V]) {
  if constexpr (std::is_same_v<T, Half> && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2*>(pack.at)[j / 2]);
      values[j] = pair.x;
      values[j + 1] = pair.y;
    }
  } else if constexpr (std::is_same_v<T, BFloat16> && V % 2 == 0) {
    // A bfloat16 is the upper half of a float.
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      const std::uint32_t pair = reinterpret_cast<const std::uint32_t*>(pack.at)[j / 2];
      values[j] = __uint_as_float(pair << 16);
      values[j + 1] = __uint_as_float(pair & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = static_cast<S>(pack.at[j]);
    }
  }
}

/// The values, rounded to T.
template <class T, int V, class S>
__device__ Pack<T, V> pack_of(const S (&values)[V]) {
  Pack<T, V> pack;
  if constexpr (std::is_same_v<T, Half> && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      reinterpret_cast<__half2*>(pack.at)[j / 2] = __floats2half2_rn(values[j], values[j + 1]);
    }
  } else if constexpr (std::is_same_v<T, BFloat16> && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      reinterpret_cast<__nv_bfloat162*>(pack.at)[j / 2] = __floats2bfloat162_rn(values[j], values[j + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      pack.at[j] = static_cast<T>(values[j]);
    }
  }
  return pack;
}

/// The columns from `column` on of a row that may be absent.
template <int V, class T>
__device__ Pack<T, V> load_or(const T* row, std::int64_t column, float absent) {
  if (row != nullptr) {
    return load<V>(row + column);
  }
  Pack<T, V> pack;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    pack.at[j] = static_cast<T>(absent);
  }
  return pack;
}

/// f(i, column, inside) for each of the thread's packs: number i starts at `column`; `inside` says whether a row of
/// `columns` reaches that far.
template <class L, int V, class F>
__device__ void for_packs(std::int64_t columns, F f) {
  const int lane = threadIdx.x % L::kThreads;
  const int end = static_cast<int>(columns < L::kColumns ? columns : L::kColumns);
#pragma unroll
  for (int i = 0; i < L::kElements / V; ++i) {
    const int column = (i * L::kThreads + lane) * V;
    f(i, column, column < end);
  }
}

/// The thread's share of a row; zeros past its end.
template <class L, int V, class T>
__device__ void load_share(const T* row, std::int64_t columns, Pack<T, V> (&packs)[L::kElements / V]) {
  for_packs<L, V>(columns, [&](int i, int column, bool inside) {
    if (inside) {
      packs[i] = load<V>(row + column);
    } else {
      packs[i] = {};
    }
  });
}

/// The sum over kLanes neighboring lanes, to the same bits in each.
template <int kLanes, class S>
__device__ S sum_lanes(S value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

/// The sums of a and of b over a warp: the lower 16 lanes have the one, the upper the other.
template <class S>
__device__ S sum_pair(S a, S b) {
  const bool upper = threadIdx.x % kWarp >= kWarp / 2;
  const S mine = (upper ? b : a) + __shfl_xor_sync(kAllLanes, upper ? a : b, kWarp / 2);
  return sum_lanes<kWarp / 2>(mine);
}

/// Where the warps of a block meet. Two buffers are used in turn, so that one barrier a meeting is enough.
template <class Value, class L>
class Exchange {
 public:
  struct Shared {
    Value values[2][L::kOneWarp ? 1 : L::kWarps];
  };

  __device__ explicit Exchange(Shared& shared) : shared_(shared) {}

  /// Leaves the warp's value; returns that of warp number `lane`, or `absent` where there is none.
  __device__ Value swap(const Value& value, const Value& absent) {
    const int lane = threadIdx.x % kWarp;
    turn_ ^= 1;
    if (lane == 0) {
      shared_.values[turn_][threadIdx.x / kWarp] = value;
    }
    __syncthreads();
    return lane < L::kWarps ? shared_.values[turn_][lane] : absent;
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

// On the host.

/// As many blocks as a grid's x axis can have; kernels loop over what is left.
inline unsigned grid_of(std::int64_t blocks) { return static_cast<unsigned>(std::min<std::int64_t>(blocks, INT_MAX)); }

/// Calls f with an integral_constant: the elements of T in 16 bytes where the row length and every pointer (null: none)
/// allow such loads, else 1.
template <class T, class F, class... Pointers>
void with_pack_size(std::int64_t columns, F&& f, const Pointers*... pointers) {
  constexpr int kFull = 16 / sizeof(T);
  const bool aligned = ((reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0) && ...);
  if (aligned && columns % kFull == 0) {
    f(std::integral_constant<int, kFull>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

/// macro(T, W) for the types that on_row_types() may choose, or for those of them whose sums are float: for explicit
/// instantiations.
#define MICA_FOR_FLOAT_SUM_ROW_TYPES(macro) \
  macro(Half, Half);                        \
  macro(Half, float);                       \
  macro(BFloat16, BFloat16);                \
  macro(BFloat16, float);                   \
  macro(float, float)
#define MICA_FOR_ROW_TYPES(macro)      \
  MICA_FOR_FLOAT_SUM_ROW_TYPES(macro); \
  macro(double, double)

/// Calls f.operator()<T, W>() with the types of x and of its parameters: W is T or the type of its sums.
template <class F>
void on_row_types(DType x, DType parameter, const char* op, F&& f) {
  on_dtype(FloatTypes{}, x, op, [&]<class T>() {
    using S = Accumulate<T>;
    using Parameters = std::conditional_t<std::is_same_v<T, S>, Types<T>, Types<T, S>>;
    on_dtype(Parameters{}, parameter, op, [&]<class W>() { f.template operator()<T, W>(); });
  });
}

}  // namespace mica::kernels::rows
