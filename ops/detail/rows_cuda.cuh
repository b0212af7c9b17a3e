#pragma once

// How threads share rows of a matrix (M, N). V is the number of columns in a pack.

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/cuda/reduce.cuh>
#include <mica/core/dispatch.h>

namespace mica::kernels::rows {

using cuda::kAllLanes;
using cuda::kWarp;
using cuda::load;
using cuda::load_or;
using cuda::load_streaming;
using cuda::Pack;
using cuda::pack_of;
using cuda::store;
using cuda::store_whole;
using cuda::sum_lanes;
using cuda::sum_pair;
using cuda::unpack;
using cuda::with_pack_size;

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
