#pragma once

// Forward for rows that their threads hold in registers from the one time they are read until y is written:
//
//   x (+ residual, x_bias) ──▶ packs in registers ──────────────────────▶ · rstd, weight, bias ──▶ y
//                                │       │                                      ▲
//                                ▼       └─▶ differences from a shift ──▶ moments: lanes, warps, blocks
//                               sum

#include <algorithm>
#include <climits>
#include <type_traits>
#include <utility>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/ops/norm/detail/norm_forward_packs_cuda.cuh>

namespace mica::kernels::norm_cuda {

namespace {

// Σ (x − shift) of a thread and, if kSquares, Σ (x − shift)².
template <bool kSquares, class N, int V, int P, int kLanes, class T, class S = Accumulate<T>>
__device__ Moments<S> sum_differences(const RowPacks<N, T, V, P, kLanes>& row, const Share<V, P, kLanes>& share) {
  Moments<S> sums{0, 0};
#pragma unroll
  for (int i = 0; i < P; ++i) {
    S values[V];
    row.differences(i, share, values);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (N::kCentered) {
        sums.a += values[j];
      }
      if constexpr (kSquares) {
        sums.b = fma(values[j], values[j], sums.b);
      }
    }
  }
  return sums;
}

// Σ (x − shift − mean)² of a thread.
template <class N, int V, int P, int kLanes, class T, class S>
__device__ S sum_squares(const RowPacks<N, T, V, P, kLanes>& row, const Share<V, P, kLanes>& share, S mean) {
  S sum = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    S values[V];
    row.differences(i, share, values);
    const S from = share.has(i) ? mean : S(0);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const S difference = values[j] - from;
      sum = fma(difference, difference, sum);
    }
  }
  return sum;
}

// y of pack number i, from its differences.
template <bool kBoth, class N, int V, class Parameters, class S>
__device__ void apply(S (&values)[V], int i, S mean, S rstd, const Parameters& parameters) {
  constexpr int kPart = Parameters::kPart;
  const S offset = -mean * rstd;
#pragma unroll
  for (int part = 0; part < V; part += kPart) {
    S w[kPart];
    S b[kPart];
    parameters.template at<kBoth>(i, part, w, b);
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      S& value = values[part + j];
      value = N::kCentered ? fma(fma(value, rstd, offset), w[j], b[j]) : value * rstd * w[j];
    }
  }
}

// y of a thread's packs.
template <bool kBoth, class N, int V, int P, int kLanes, class T, class Parameters, class S>
__device__ void write_packs(const RowPacks<N, T, V, P, kLanes>& row, const Share<V, P, kLanes>& share, S mean, S rstd,
                            const Parameters& parameters, T* y) {
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (share.has(i)) {
      S values[V];
      row.differences(i, share, values);
      apply<kBoth, N>(values, i, mean, rstd, parameters);
      store(y + i * (kLanes * V), pack_of<T>(values));
    }
  }
}

// A thread's share of a row whose squares overflow, or that is not finite.
template <class N, class T, class W, int V, int P, int kLanes, RowTeam kTeam, bool kSeveral>
__device__ void normalize_shrunk_row(const Forward<T, W>& a, const T* rows, const NormForwardPlan& p, int block,
                                     bool mine) {
  using S = Accumulate<T>;
  // Not known to be the same as before, so that nothing that follows from them is kept until here.
  int lane = threadIdx.x;
  asm volatile("" : "+r"(lane), "+r"(block));
  __syncwarp();  // for what other lanes have written of a sum
  const Place<V, P, kLanes, kTeam, kSeveral> place(p, a.rows, a.columns, lane, block);
  const T* const x_row = rows + (place.present ? place.row : 0) * a.columns;
  const S shift = static_cast<S>(x_row[0]) * kShrink<S>;
  const Moments<S> m = shrunk_moments<kLanes>(x_row, a.columns, shift, a.in_row);
  if (!mine) {
    return;  // lanes of a row of its own
  }
  const S rstd = rsqrt(m.b * a.in_row + a.eps * kShrink<S> * kShrink<S>);
#pragma unroll 1
  for (int i = 0; i < P * V; ++i) {
    if (place.share.has(i / V)) {
      const std::int64_t column = place.at + i / V * (kLanes * V) + i % V;
      const S x = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift);
      const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
      const S b = a.bias == nullptr ? S(0) : static_cast<S>(a.bias[column]);
      a.y[place.row * a.columns + column] = static_cast<T>(fma((x - m.a) * rstd, w, b));
    }
  }
  if (lane == 0 && place.rank == 0) {
    write_statistics<N>(a, place.row, shift + m.a, mean_rounding(shift, m.a), rstd, kShrink<S>);
  }
}

// A row that its team holds in registers. `moments` are shared. kBoth: weight and bias are known to be present.
template <bool kBoth, class N, class T, class W, int V, int P, int kLanes, RowTeam kTeam, bool kSeveral,
          class Parameters>
__device__ void normalize_row(const Forward<T, W>& a, const T* rows, const NormForwardPlan& p,
                              RowPacks<N, T, V, P, kLanes>& row, const Place<V, P, kLanes, kTeam, kSeveral>& place,
                              const Parameters& parameters, Moments<Accumulate<T>>* moments,
                              const SlabMeeting<Accumulate<T>>& slab_meeting, int block) {
  using S = Accumulate<T>;
  if constexpr (N::kCentered && N::kSource != Source::x) {
    row.template share_first<kTeam>();
  }
  const S shift = row.find_shift(place.share);
  constexpr bool kSquares = !N::kCentered || kOnePass<T, V>;
  Moments<S> m = sum_differences<kSquares>(row, place.share);
  if constexpr (kSquares) {
    m = place.template sum<N::kCentered>(m, moments, slab_meeting);
    if constexpr (N::kCentered) {
      const S mean = m.a * a.in_row;
      const S squares = fma(-m.a, mean, m.b);
      m = {mean, squares < 0 ? S(0) : squares};
    }
  } else {
    m.a *= reciprocal(static_cast<S>(place.share.elements()));
    m.b = sum_squares(row, place.share, m.a);
    m = place.combine(a.columns, m, moments, slab_meeting);
  }
  row.forget();
  const bool overflow = N::kCentered && !isfinite(m.b);
  if (N::kCentered && __any_sync(kAllLanes, overflow)) {
    normalize_shrunk_row<N, T, W, V, P, kLanes, kTeam, kSeveral>(a, rows, p, block, overflow);
    if (kLanes == kWarp) {
      return;  // of one row, all lanes agree
    }
  }
  if (place.present && !overflow) {
    const S rstd = rsqrt(m.b * a.in_row + a.eps);
    if (threadIdx.x == 0 && place.rank == 0) {
      write_statistics<N>(a, place.row, shift + m.a, mean_rounding(shift, m.a), rstd, S(1));
    }
    T* const y = a.y + place.row * a.columns + place.at;
    if (kBoth || parameters.both()) {
      write_packs<true>(row, place.share, m.a, rstd, parameters, y);
    } else {
      write_packs<false>(row, place.share, m.a, rstd, parameters, y);
    }
  }
}

// Whether blocks that stay have the parameters in shared memory: those of 16-bit rows that are float.
template <class N, class T, class W, bool kStays>
constexpr bool kShares = kStays&& N::kCentered && sizeof(T) == 2 && sizeof(W) == 4;

// Threads of a block, at most.
template <RowTeam kTeam, bool kShared>
constexpr int kMostThreads = kTeam != RowTeam::block ? kForwardBlock / 2
                             : kShared               ? kSharingBlock
                                                     : kForwardBlock;

// Blocks of so many that a multiprocessor has room for: as many as possible such that nothing is spilled.
template <class N, class T, class W, int V, int P, int kLanes, RowTeam kTeam, bool kStays>
constexpr int kLeastBlocks = [] {
  constexpr int kBytes = P * V * static_cast<int>(sizeof(T));  // of a row that a thread holds
  if (sizeof(T) == 8) {
    return 1;
  }
  if (N::kSource != Source::x) {
    return kTeam == RowTeam::block ? 2 : kBytes <= 32 ? 4 : 3;
  }
  if (V == 1 || kTeam == RowTeam::blocks) {
    return kTeam == RowTeam::block ? 2 : 3;
  }
  if (kTeam == RowTeam::block) {
    return kShares<N, T, W, kStays> ? 1 : !kStays && sizeof(T) == 2 ? 3 : 2;
  }
  if (kStays) {
    return kLanes == kWarp && kBytes <= 16 ? 5 : kBytes <= 48 ? 4 : 3;
  }
  if (kLanes < kWarp) {
    return 3;
  }
  return kBytes <= 16 ? 8 : kBytes <= 32 || (sizeof(T) == 4 && kBytes <= 64) ? 6 : 4;
}();

// Whether x may be told to stay in the L2 cache longest. What is written then leaves it in the order in which it came,
// which suits memory. Rows on their way while others are written gain nothing.
template <class N, class T, class W, int V, int P, RowTeam kTeam, bool kStays>
constexpr bool kPolicy = sizeof(Pack<T, V>) == 16 &&
                         (N::kSource != Source::x ||
                          (kStays           ? kShares<N, T, W, true>
                           : sizeof(T) == 2 ? kTeam == RowTeam::block
                                            : sizeof(T) == 4 && (P == 8 || (kTeam != RowTeam::block && P == 4))));

// The rows of a team: one or, if kStays, one after another, of which the next is on its way while the team is at one.
template <class N, class T, class W, int V, int P, int kLanes, RowTeam kTeam, bool kStays>
__global__ void __launch_bounds__((kMostThreads<kTeam, kShares<N, T, W, kStays>>),
                                  (kLeastBlocks<N, T, W, V, P, kLanes, kTeam, kStays>))
    norm_forward_held_kernel(const Forward<T, W> a, const AddendsOf<N, T> addends, const NormForwardPlan p,
                             const SlabMeeting<Accumulate<T>> slab_meeting) {
  constexpr bool kShared = kShares<N, T, W, kStays>;
  constexpr bool kSeveral = kShared;
  constexpr int kWarps = kTeam <= RowTeam::warp ? 1 : kMostThreads<kTeam, kShared> / kWarp;
  __shared__ Moments<Accumulate<T>> moments[kStays ? 2 : 1][kWarps];
  extern __shared__ __align__(16) unsigned char memory[];
  const int block = kTeam == RowTeam::blocks ? slab_meeting.number() : blockIdx.x;
  Place<V, P, kLanes, kTeam, kSeveral> place(p, a.rows, a.columns, threadIdx.x, block);
  if (!kStays && kTeam == RowTeam::warp && !place.present) {
    return;  // lanes of less than a warp stay, to take part in what warps do together
  }
  constexpr bool kByPolicy = kPolicy<N, T, W, V, P, kTeam, kStays>;
  const std::uint64_t policy = !kByPolicy ? 0 : a.inputs_last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
  RowPacks<N, T, V, P, kLanes> row;
  const std::int64_t begin = (place.present ? place.row : 0) * a.columns;
  row.template load_from<kByPolicy>(a.x + begin, place.at, place.share, policy);
  const Parameters<N, W, V, kLanes, kShared> parameters(a.weight, a.bias, place.at, static_cast<int>(a.columns),
                                                        reinterpret_cast<W*>(memory));
  if constexpr (!kStays) {
    const T* rows = a.x;
    if constexpr (N::kSource != Source::x) {
      row.add(addends, begin, static_cast<int>(place.at), place.share, policy);
      rows = addends.sum;
    }
    normalize_row<false>(a, rows, p, row, place, parameters, moments[0], slab_meeting, block);
  } else {
    if constexpr (kShared) {
      __syncthreads();
    }
    const int step = gridDim.x;
    int at = block;
#pragma unroll 1
    for (int turn = 0; std::int64_t{at} * p.teams < a.rows; turn ^= 1) {
      RowPacks<N, T, V, P, kLanes> current = row;
      const Place<V, P, kLanes, kTeam, kSeveral> next(p, a.rows, a.columns, threadIdx.x, at + step);
      if (next.present) {
        row.template load_from<kByPolicy>(a.x + next.row * a.columns, next.at, next.share, policy);
      }
      if (kLanes < kWarp || place.present) {
        normalize_row<true>(a, a.x, p, current, place, parameters, moments[turn], slab_meeting, at);
      }
      place = next;
      at += step;
    }
  }
}

// On the host.

template <class N, class T, class W, int V, int P, int kLanes, RowTeam kTeam, bool kStays>
void launch(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  const auto kernel = norm_forward_held_kernel<N, T, W, V, P, kLanes, kTeam, kStays>;
  const char* const name = kStays                     ? "norm_forward_held_kernel<stays>"
                           : kTeam == RowTeam::block  ? "norm_forward_held_kernel<block>"
                           : kTeam == RowTeam::blocks ? "norm_forward_held_kernel<blocks>"
                                                      : "norm_forward_held_kernel<warp>";
  int shared = 0;
  if constexpr (kShares<N, T, W, kStays>) {
    shared = Parameters<N, W, V, kLanes, true>::bytes(static_cast<int>(a.columns));
    cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                "cudaFuncSetAttribute");
  }
  // A grid has at most INT_MAX blocks.
  const std::int64_t most = INT_MAX / 2 / p.blocks * std::int64_t{kTeam <= RowTeam::warp ? p.teams : 1};
  for (std::int64_t begin = 0; begin < a.rows; begin += most) {
    const Forward<T, W> part = rows_of(a, begin, std::min(most, a.rows - begin));
    const AddendsOf<N, T> added = rows_of(addends, begin * a.columns);
    SlabMeetingMemory<Accumulate<T>> meeting(kTeam == RowTeam::blocks ? part.rows : 0, p.blocks);
    auto blocks = static_cast<unsigned>((part.rows + p.teams - 1) / p.teams * p.blocks);
    if constexpr (kStays) {
      int resident = 0;
      cuda::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, p.threads * p.teams, shared),
                  "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
      // More blocks make up for multiprocessors that are slower than others, but each reads the parameters.
      const int turns = kTeam <= RowTeam::warp && a.inputs_last_in_l2 ? 4 : 1;
      if (!kShares<N, T, W, kStays>) {
        resident = kLeastBlocks<N, T, W, V, P, kLanes, kTeam, kStays> * kMostThreads<kTeam, false> / p.threads;
      }
      blocks = std::min<unsigned>(blocks, resident * turns * cuda::multiprocessor_count());
    }
    kernel<<<blocks, dim3(p.threads, p.teams), shared, cuda::current_stream()>>>(part, added, p, meeting.on_device());
    cuda::check_launch(name);
  }
}

// What the plan may choose for packs of V columns.
template <class N, class T, class W, int V, int P, int kLanes, RowTeam kTeam>
void launch(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  constexpr bool kMayStay = N::kSource == Source::x && V >= 4 && kTeam != RowTeam::blocks &&
                            (kShares<N, T, W, true> || (kTeam == RowTeam::block && P == 2));
  constexpr bool kMustStay = kMayStay && kTeam <= RowTeam::warp;
  if constexpr (kMayStay) {
    if (kMustStay || p.stays) {
      return launch<N, T, W, V, P, kLanes, kTeam, true>(a, addends, p);
    }
  }
  if constexpr (!kMustStay) {
    launch<N, T, W, V, P, kLanes, kTeam, false>(a, addends, p);
  }
}

template <class N, class T, class W, int V, RowTeam kTeam, int... P>
bool launch_packs(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p,
                  std::integer_sequence<int, P...>) {
  return ((p.packs == P && (launch<N, T, W, V, P, kWarp, kTeam>(a, addends, p), true)) || ...);
}

template <class N, class T, class W, int V>
bool launch(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  using Warp =
      std::conditional_t<V == 1, std::integer_sequence<int, 4, 8, 16>,
                         std::conditional_t<V == 2, std::integer_sequence<int, 1, 2, 4, 8>,
                                            std::conditional_t<V == 4 && !N::kCentered && N::kSource == Source::x,
                                                               std::integer_sequence<int, 1, 2, 3, 4, 8>,
                                                               std::integer_sequence<int, 1, 2, 3, 4>>>>;
  using Block = std::conditional_t<
      V == 1, std::integer_sequence<int, 8, 16>,
      std::conditional_t<V == 2, std::integer_sequence<int, 1, 2, 4, 8>,
                         std::conditional_t<V == 4 && N::kSource == Source::x, std::integer_sequence<int, 2, 4, 8>,
                                            std::conditional_t<V == 4, std::integer_sequence<int, 2, 4>,
                                                               std::integer_sequence<int, 2, 3, 4>>>>>;
  using Blocks = std::integer_sequence<int, V == 1 ? 16 : V == 8 ? 4 : 8>;
  if constexpr (V == 1 && sizeof(T) == 2) {  // fewer of single elements are staged
    if constexpr (N::kCentered) {
      return p.team == RowTeam::blocks && launch_packs<N, T, W, V, RowTeam::blocks>(a, addends, p, Blocks{});
    }
    return false;
  } else {
    switch (p.team) {
      case RowTeam::lanes:
        if (p.threads == 8) {
          launch<N, T, W, V, std::max(1, 8 / V), 8, RowTeam::lanes>(a, addends, p);
          return true;
        }
        if constexpr (V == 8) {
          launch<N, T, W, V, 1, 16, RowTeam::lanes>(a, addends, p);
          return true;
        }
        return false;
      case RowTeam::warp: return launch_packs<N, T, W, V, RowTeam::warp>(a, addends, p, Warp{});
      case RowTeam::block: return launch_packs<N, T, W, V, RowTeam::block>(a, addends, p, Block{});
      case RowTeam::blocks:
        if constexpr (N::kCentered && N::kSource == Source::x) {
          return launch_packs<N, T, W, V, RowTeam::blocks>(a, addends, p, Blocks{});
        }
        return false;
      default: return false;
    }
  }
}

}  // namespace

template <class N, class T, class W>
void forward_held(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  bool done = false;
  if (p.pack > 1) {
    done = launch<N, T, W, 16 / sizeof(T)>(a, addends, p);
  } else if constexpr (N::kSource == Source::x) {
    done = launch<N, T, W, 1>(a, addends, p);
  }
  check(done, "norm: there is no forward that holds {} packs of {} columns a thread", p.packs, p.pack);
}

}  // namespace mica::kernels::norm_cuda
