#pragma once

// Forward for rows that are read once, and then held in the registers of a warp, a block or a cluster until y is
// written:
//
//   x (+ residual, x_bias) ──▶ packs in registers ──────────────────────▶ · rstd, weight, bias ──▶ y
//                                │       │                                      ▲
//                                ▼       └─▶ differences from a shift ──▶ moments over lanes, warps, blocks
//                               sum

#include <algorithm>
#include <climits>

#include <mica/core/cuda/launch.h>
#include <mica/ops/norm/detail/norm_forward_held_meeting_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward_held_writes_cuda.cuh>

namespace mica::kernels::norm_cuda {

namespace {

// Σ (x − shift) over a thread's elements, if the norm is centered, and Σ (x − shift)², if kSquares.
template <bool kSquares, class H, class S = typename H::S>
__device__ Moments<S> sum_differences(const RowPacks<H>& row, const Place<H>& place) {
  Moments<S> sums{0, 0};
#pragma unroll
  for (int i = 0; i < H::P; ++i) {
    S values[H::V];
    row.differences(i, place, values);
#pragma unroll
    for (const S value : values) {
      if constexpr (H::N::kCentered) {
        sums.a += value;
      }
      if constexpr (kSquares) {
        sums.b = fma(value, value, sums.b);
      }
    }
  }
  return sums;
}

// Σ (x − shift − mean)² over a thread's elements.
template <class H, class S>
__device__ S sum_squares(const RowPacks<H>& row, const Place<H>& place, S mean) {
  S sum = 0;
#pragma unroll
  for (int i = 0; i < H::P; ++i) {
    S values[H::V];
    row.differences(i, place, values);
    const S from = place.has(i) ? mean : S(0);
#pragma unroll
    for (const S value : values) {
      const S difference = value - from;
      sum = fma(difference, difference, sum);
    }
  }
  return sum;
}

// Returns the mean of a row's differences from its shift, and Σ (x − shift − mean)², in all threads of the row.
template <class H, class S = typename H::S>
__device__ Moments<S> find_moments(RowPacks<H>& row, const Place<H>& place,
                                   const Forward<typename H::T, typename H::W>& a, TeamMeeting<H>& meeting) {
  constexpr bool kCentered = H::N::kCentered;
  constexpr bool kSquares = !kCentered || kOnePass<typename H::T, H::V>;
  Moments<S> m = sum_differences<kSquares>(row, place);
  if constexpr (kSquares) {
    m = meeting.template sum<kCentered>(m, place);
    if constexpr (kCentered) {
      const S mean = m.a * a.in_row;
      const S squares = fma(-m.a, mean, m.b);
      m = {mean, squares < 0 ? S(0) : squares};
    }
    return m;
  } else {
    m.a *= reciprocal(static_cast<S>(place.elements()));
    if constexpr (H::kEdges) {
      if (place.edges) {
        row.fill_edges(place, m.a);
      }
    }
    m.b = sum_squares(row, place, m.a);
    return meeting.combine(m, place, a.in_row);
  }
}

// Computes a thread's part of a row whose squares overflow, or that is not finite. `mine`: whether the thread's own row
// is such a row, and not only the row of other lanes of its warp.
template <class H, class T, class W>
__device__ void normalize_shrunk_row(const Forward<T, W>& a, const T* rows, const NormForwardPlan& p,
                                     typename Run<H>::Index row, int phase, bool mine) {
  using S = typename H::S;
  // Hides from the compiler that these values are the same as before. Otherwise it would keep what it has computed from
  // them in registers until here.
  int lane = threadIdx.x;
  asm volatile("" : "+r"(lane), "+r"(phase));
  S eps = a.eps;
  if constexpr (sizeof(S) == 4) {
    asm volatile("" : "+f"(eps));
  }
  if constexpr (!H::kWarps && !H::kStays) {
    row = Run<H>(p, a.rows, opaque(static_cast<int>(blockIdx.x))).first;
  }
  __syncwarp();  // this lane reads what other lanes have written of a sum
  const Place<H> place(p, static_cast<int>(a.columns), lane, phase);
  const T* const x_row = rows + (row < a.rows ? row : 0) * a.columns;
  const S shift = static_cast<S>(x_row[0]) * kShrink<S>;
  const Moments<S> m = shrunk_moments<H::kLanes>(x_row, a.columns, shift, a.in_row);
  if (!mine) {
    return;  // the lane was needed only for the shuffles
  }
  const S rstd = rsqrt(m.b * a.in_row + eps * kShrink<S> * kShrink<S>);
#pragma unroll 1
  for (int i = 0; i < H::P * H::V; ++i) {
    const int column = place.first - phase + i / H::V * H::kStep + i % H::V;
    if (column >= 0 && column < place.columns - phase) {
      const S x = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift);
      const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
      const S b = a.bias == nullptr ? S(0) : static_cast<S>(a.bias[column]);
      a.y[row * a.columns + column] = static_cast<T>(fma((x - m.a) * rstd, w, b));
    }
  }
  if (lane == 0 && place.rank == 0) {
    write_statistics<typename H::N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, kShrink<S>);
  }
}

// Computes a row of `rows` (x, or the sums) that its team holds in registers. kBoth: weight and bias are known to be
// present. Lanes without a row help with shuffles.
template <bool kBoth, class H, class T, class W, class S = typename H::S>
__device__ void normalize_row(const Forward<T, W>& a, const T* rows, const NormForwardPlan& p, RowPacks<H>& packs,
                              const Place<H>& place, const Parameters<H>& parameters, TeamMeeting<H>& meeting,
                              typename Run<H>::Index row) {
  constexpr bool kCentered = H::N::kCentered;
  if constexpr (kCentered && H::kAdds) {
    packs.share_first();
  }
  const S shift = packs.find_shift(place);
  const Moments<S> m = find_moments(packs, place, a, meeting);
  packs.forget();
  const bool overflow = kCentered && !isfinite(m.b);
  if (kCentered && __any_sync(kAllLanes, overflow)) {
    normalize_shrunk_row<H>(a, rows, p, row, place.phase, overflow);
    if (H::kLanes == kWarp) {
      return;  // all lanes have the same row
    }
  }
  if ((H::kLanes == kWarp || row < a.rows) && !overflow) {
    const S rstd = rsqrt(m.b * a.in_row + a.eps);
    if (threadIdx.x == 0 && place.rank == 0) {
      write_statistics<typename H::N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, S(1));
    }
    T* const y = opaque(a.y + (row * a.columns - place.phase + place.first));
    const auto write = [&]<bool kPresent>() {
      if constexpr (H::V == 1) {
        write_elements<kPresent>(packs, place, m.a, rstd, parameters, y);
      } else if constexpr (!H::kEdges) {
        write_packs<kPresent>(packs, place, m.a, rstd, parameters, y);
      } else if (place.edges) {
        write_packs_by_column<true>(packs, place, m.a, rstd, parameters, y);
      } else {
        write_packs_by_column<false>(packs, place, m.a, rstd, parameters, y);
      }
    };
    kBoth || parameters.both() ? write.template operator()<true>() : write.template operator()<false>();
  }
}

// Computes the rows of a run, one after another. The team loads its next row while it computes the current one.
template <class H, class T, class W>
__device__ void normalize_run(const Forward<T, W>& a, const NormForwardPlan& p, const Run<H>& run,
                              unsigned char* memory, TeamMeeting<H>& meeting) {
  // Computed again for each row: registers that hold it would be spilled.
  const auto place_of = [&](typename Run<H>::Index row) {
    const unsigned begin = static_cast<unsigned>(row) * static_cast<unsigned>(a.columns);
    return Place<H>(p, static_cast<int>(a.columns), opaque(static_cast<int>(threadIdx.x)),
                    H::kEdges ? static_cast<int>(begin % H::V) : 0);
  };
  [[maybe_unused]] __shared__ Pack<T, H::V> firsts[H::kMostThreads / kWarp];
  const auto first_pack = [&]() -> Pack<T, H::V>& {
    return firsts[(threadIdx.y * blockDim.x + opaque(static_cast<int>(threadIdx.x))) / kWarp];
  };
  RowPacks<H> next;
  const auto load = [&](typename Run<H>::Index row, const Place<H>& place) {
    if constexpr (H::kEdges && H::N::kCentered) {
      if (row < run.end) {
        RowPacks<H>::copy_first(first_pack(), a.x + (row * a.columns - place.phase));
      }
    }
    next.load_from(a.x + (row * a.columns - place.phase), place, a.policy, row < run.end, row + 1 == a.rows);
  };
  const Place<H> first = place_of(run.first);
  load(run.first, first);
  const Parameters<H> parameters(a, first, memory);
  if constexpr (H::kShares) {
    __syncthreads();
  }
#pragma unroll 1
  for (auto row = run.first; row < run.end; row += run.step) {
    RowPacks<H> packs = next;
    if constexpr (H::kEdges && H::N::kCentered) {
      packs.take_first(first_pack());
    }
    load(row + run.step, place_of(row + run.step));
    Place<H> here = place_of(row);
    here.find_edges();
    normalize_row<true>(a, a.x, p, packs, here, parameters, meeting, row);
  }
}

// Computes one row per team or, if blocks are persistent, one row after another.
template <class H, class N = typename H::N, class T = typename H::T, class W = typename H::W>
__global__ void __launch_bounds__(H::kMostThreads, H::kLeastBlocks)
    norm_forward_held_kernel(const Forward<T, W> a, const AddendsOf<N, T> addends, const NormForwardPlan p) {
  __shared__ typename TeamMeeting<H>::Shared shared;
  extern __shared__ __align__(16) unsigned char memory[];
  TeamMeeting<H> meeting(shared, p);
  const Run<H> run(p, a.rows, static_cast<int>(blockIdx.x));
  if constexpr (H::kStays) {
    normalize_run<H>(a, p, run, memory, meeting);
  } else {
    const bool present = run.first < a.rows;
    if (H::kTeam == Team::warp && !present) {
      return;  // if rows share a warp, its lanes without a row are needed for shuffles
    }
    const Place<H> place(p, H::kLanes == kWarp || present ? static_cast<int>(a.columns) : 0, threadIdx.x, 0);
    const std::int64_t begin = present ? run.first * a.columns : 0;
    RowPacks<H> packs;
    packs.load_from(a.x + begin, place, a.policy, true, false);
    const Parameters<H> parameters(a, place, memory);
    const T* rows = a.x;
    if constexpr (H::kAdds) {
      packs.add(addends, begin, place, a.policy);
      rows = addends.sum;
    }
    normalize_row<false>(a, rows, p, packs, place, parameters, meeting, run.first);
  }
}

// On the host.

// The number of persistent blocks to launch. With `wanted` blocks, each team would have a single row.
template <class H, class Kernel>
unsigned staying_blocks(Kernel kernel, const NormForwardPlan& p, const cuda::Launch& launch, std::int64_t bytes,
                        unsigned wanted) {
  if constexpr (H::kTeam == Team::cluster) {
    return std::min<unsigned>(wanted, launch.resident(kernel));
  }
  const int resident = H::kShares ? launch.resident(kernel)
                                  : H::kLeastBlocks * H::kMostThreads / p.threads * cuda::multiprocessor_count();
  // More blocks balance the load if some multiprocessors are slower than others, but each block loads the parameters.
  if constexpr (!H::kShares) {
    return blocks_of_turns(wanted, /*turns=*/4, resident);
  } else {
    const bool is_long = H::kTeam == Team::block && p.threads > 128;
    const bool many_bytes = bytes > 40 << 20;
    const bool more = many_bytes && !is_long && (H::kTeam != Team::block || H::P > 2);
    const unsigned most = resident * (more ? 4 : 1);
    if (is_long && wanted > most && wanted < 32 * most) {  // about the same number of rows for each block
      const unsigned rows = (wanted + most - 1) / most;
      return (wanted + rows - 1) / rows;
    }
    return std::min(wanted, most);
  }
}

template <class H, class T, class W>
void launch(const Forward<T, W>& a, const AddendsOf<typename H::N, T>& addends, const NormForwardPlan& p) {
  const auto kernel = norm_forward_held_kernel<H>;
  const int shared_bytes = Parameters<H>::bytes(H::kEdges                   ? p.threads
                                                : H::kTeam == Team::cluster ? p.slab
                                                                            : static_cast<int>(a.columns));
  cuda::Launch launch(p.blocks, dim3(p.threads, p.teams), shared_bytes);
  launch.cluster(p.blocks);
  const std::int64_t wanted = (a.rows + p.teams - 1) / p.teams;
  check(wanted <= INT_MAX / 2, "norm: {} rows are too many", a.rows);
  auto blocks = static_cast<unsigned>(wanted);
  if constexpr (H::kStays) {
    blocks = staying_blocks<H>(kernel, p, launch, a.rows * a.columns * static_cast<int>(sizeof(T)), blocks);
  }
  constexpr const char* kName = H::kEdges                   ? "norm_forward_held_kernel<edges>"
                                : H::kTeam == Team::cluster ? "norm_forward_held_kernel<cluster>"
                                : H::kStays                 ? "norm_forward_held_kernel<stays>"
                                : H::kFew                   ? "norm_forward_held_kernel<few>"
                                : H::kTeam == Team::block   ? "norm_forward_held_kernel<block>"
                                                            : "norm_forward_held_kernel<warp>";
  launch.grid(blocks * p.blocks).run(kernel, kName, a, addends, p);
}

// Launches the kernel that the plan has chosen, if its team is kTeam (of kLanes lanes, unless it is a block), and P
// includes its number of packs. Returns whether it did.
template <class N, class T, class W, int V, Team kTeam, int kLanes, int... P>
bool launch_one_of(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  const auto launch_packs = [&]<int kPacks>() {
    using Many = HeldShape<N, T, W, kTeam, kLanes, V, kPacks, Blocks::many>;
    using Few = HeldShape<N, T, W, kTeam, kLanes, V, kPacks, Blocks::few>;
    using Staying = HeldShape<N, T, W, kTeam, kLanes, V, kPacks, Blocks::stay>;
    constexpr bool kHasFew = sizeof(T) <= 4 && kPacks > 1;
    constexpr bool kCluster = kTeam == Team::cluster;
    constexpr bool kMayStay = kCluster || (!Staying::kAdds && sizeof(T) <= 4 && V >= 4 && N::kCentered &&
                                           (Staying::kShares || (kTeam == Team::block && kPacks == 2)));
    constexpr bool kMustStay = kMayStay && kTeam != Team::block;  // except clusters, if there are few rows
    if constexpr (kHasFew && (kCluster || !kMustStay)) {
      if (p.few) {
        return launch<Few>(a, addends, p);
      }
    }
    if constexpr (kMayStay) {
      if (kMustStay || p.stays) {
        return launch<Staying>(a, addends, p);
      }
    }
    if constexpr (!kMustStay) {
      launch<Many>(a, addends, p);
    }
  };
  const bool same_team = p.team == kTeam && (kTeam == Team::block || kTeam == Team::cluster || p.threads == kLanes);
  return same_team && ((p.packs == P && (launch_packs.template operator()<P>(), true)) || ...);
}

// The same for rows with edges.
template <class N, class T, class W>
bool launch_edges(const Forward<T, W>& a, const NormForwardPlan& p) {
  if constexpr (N::kSource == Source::x && sizeof(T) <= 4) {
    const auto one_of = [&]<Team kTeam, int... P>() {
      const auto launch_packs = [&]<int kPacks>() {
        launch<HeldShape<N, T, W, kTeam, kWarp, 16 / sizeof(T), kPacks, Blocks::stay_with_edges>>(a, NoAddends{}, p);
        return true;
      };
      return p.team == kTeam && ((p.packs == P && launch_packs.template operator()<P>()) || ...);
    };
    if constexpr (sizeof(T) == 4) {
      return one_of.template operator()<Team::cluster, 4, 8>();
    } else if constexpr (N::kCentered) {
      return one_of.template operator()<Team::warp, 6>() || one_of.template operator()<Team::block, 3, 4>() ||
             one_of.template operator()<Team::cluster, 4>();
    } else {
      return one_of.template operator()<Team::warp, 6>() || one_of.template operator()<Team::block, 3, 4>() ||
             one_of.template operator()<Team::cluster, 2, 4>();
    }
  }
  return false;
}

// Launches the kernel that the plan has chosen.
template <class N, class T, class W>
void launch_held(const Forward<T, W>& a, const AddendsOf<N, T>& addends, const NormForwardPlan& p) {
  constexpr bool kAdds = N::kSource != Source::x;
  const auto one_of = [&]<int V, Team kTeam, int kLanes, int... P>() {
    return p.pack == V && launch_one_of<N, T, W, V, kTeam, kLanes, P...>(a, addends, p);
  };
  bool done = false;
  if (p.edges) {
    done = launch_edges<N>(a, p);
  } else if constexpr (sizeof(T) == 2) {
    done = one_of.template operator()<8, Team::warp, kWarp, 3, 4>() ||
           one_of.template operator()<8, Team::block, kWarp, 2, 3, 4>();
    if constexpr (kAdds) {
      done = done || one_of.template operator()<8, Team::lanes, 8, 1>() ||
             one_of.template operator()<8, Team::lanes, 16, 1>() ||
             one_of.template operator()<8, Team::warp, kWarp, 1, 2>();
    } else {
      done = done || one_of.template operator()<8, Team::cluster, kWarp, 2, 4>() ||
             one_of.template operator()<2, Team::block, kWarp, 6, 8, 12>() ||  // words
             one_of.template operator()<2, Team::cluster, kWarp, 16>() ||
             one_of.template operator()<1, Team::block, kWarp, 8, 12, 16>() ||  // single elements
             one_of.template operator()<1, Team::cluster, kWarp, 16>();
    }
  } else if constexpr (sizeof(T) == 4) {
    if constexpr (kAdds) {
      done = one_of.template operator()<4, Team::lanes, 8, 2>() ||
             one_of.template operator()<4, Team::warp, kWarp, 1, 2, 3, 4>() ||
             one_of.template operator()<4, Team::block, kWarp, 2, 4>();
    } else {
      if constexpr (N::kCentered) {
        done = one_of.template operator()<4, Team::warp, kWarp, 3, 4>() ||
               one_of.template operator()<4, Team::block, kWarp, 2>();
      }
      done = done || one_of.template operator()<4, Team::block, kWarp, 4, 8>() ||
             one_of.template operator()<4, Team::cluster, kWarp, 4, 8>() ||
             one_of.template operator()<1, Team::block, kWarp, 8, 16>() ||
             one_of.template operator()<1, Team::cluster, kWarp, 16>();
    }
  } else {
    done = one_of.template operator()<2, Team::lanes, 8, 4>() ||
           one_of.template operator()<2, Team::warp, kWarp, 2, 4, 8>() ||
           one_of.template operator()<2, Team::block, kWarp, 1, 2, 4, 8>() ||
           one_of.template operator()<1, Team::lanes, 8, 8>() ||
           one_of.template operator()<1, Team::warp, kWarp, 4, 8, 16>() ||
           one_of.template operator()<1, Team::block, kWarp, 8, 16>();
  }
  check(done, "norm: there is no forward that holds {} packs of {} columns a thread", p.packs, p.pack);
}

}  // namespace

}  // namespace mica::kernels::norm_cuda
