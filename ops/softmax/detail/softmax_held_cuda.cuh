#pragma once

// Softmax of rows that fit the registers of those who share them:
//
//     1. a thread loads its packs,
//     2. finds the largest element and the sum of powers of its own; all who share the row join theirs,
//     3. computes its results from the packs, and writes them.
//
// The backward has two matrices, and one sum. A pack is 16 bytes, or as much of them as rows and pointers are multiples
// of: one element at the least.

#include <limits>

#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::HeldPacks;
using held::RowPlan;
using rows::Pack;

/// A launch's template arguments, but for the types.
template <Team kTeam_, int V_, int kElements_, bool kPacked_, int kLanes_ = rows::kWarp>
struct HeldLayout {
  static constexpr Team kTeam = kTeam_;
  static constexpr int V = V_;
  static constexpr int kElements = kElements_;  // of a row that a thread has, at most
  static constexpr int kPacks = kElements / V;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kLanes = kLanes_;    // of a warp that share a row, or a part of one
  static constexpr int kStep = kLanes * V;  // columns from a thread's pack to its next one
  static constexpr bool kWarps = kTeam == Team::block || kTeam == Team::cluster;
  static constexpr int kThreads = kWarps ? held::kMostTeamThreads : held::kWarpRows * rows::kWarp;

  /// The thread's first column. A warp's columns are neighbors.
  __device__ static int first() {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / kLanes * (kPacks * kLanes) + thread % kLanes) * V;
  }

  /// Blocks that are to fit on a multiprocessor, if each thread holds so many words of rows.
  static constexpr int least_blocks(int words) {
    constexpr int kOtherRegisters = 24;
    return 65536 / (kThreads * ((words + kOtherRegisters + 7) / 8 * 8));
  }
};

/// A pack of equal elements.
template <int V, class T>
__device__ Pack<T, V> pack_of_one(T value) {
  Pack<T, V> pack;
#pragma unroll
  for (T& element : pack.at) {
    element = value;
  }
  return pack;
}

/// Loads a thread's packs of a row; `absent` past its end. policy: for the L2 cache.
template <class L, class Packs, class T, class S>
__device__ void load_packs(Packs& packs, const T* row, int columns, S absent, std::uint64_t policy) {
  using P = Pack<T, L::V>;
  // Words: the compiler would move elements one by one as soon as they are there, before it loads others.
  using Words = std::conditional_t<sizeof(P) == 16, uint4, std::conditional_t<sizeof(P) == 8, uint2, P>>;
  const P past = pack_of_one<L::V>(static_cast<T>(absent));
  const T* const mine = row + L::first();
  const int left = columns - L::first();
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i) {
    Words words = reinterpret_cast<const Words&>(past);
    if (i * L::kStep < left) {
      P pack;
      if constexpr (sizeof(P) == 16) {
        pack = rows::load_streaming<L::V>(mine + i * L::kStep, policy);
      } else {
        pack = rows::load<L::V>(mine + i * L::kStep);
      }
      words = reinterpret_cast<const Words&>(pack);
    }
    packs.set(i, reinterpret_cast<const P&>(words));
  }
}

/// The L2 cache policy of what is read.
__device__ inline std::uint64_t policy_of(bool last_in_l2) {
  return last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
}

/// Whether powers replace the elements from which they were computed.
template <class L, class Rule>
constexpr bool keeps_powers() {
  return !Rule::kLog && !L::kPacked;
}

/// The largest of a warp's elements, and the sum of their powers, which may replace them.
template <class L, class Packs, class Rule, class Found>
__device__ Found found_in_warp(Packs& packs, const Rule& rule, int seen, Found found) {
  using S = typename Packs::S;
  constexpr int V = L::V;
  const int left = seen - L::first();
  const auto for_values = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      S values[V];
      packs.values(i, values);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        values[j] = rule.counted(values[j], i * L::kStep + j < left);
      }
      f(i, values);
    }
  };
  for_values([&](int, const S(&values)[V]) {
#pragma unroll
    for (const S value : values) {
      found.largest = larger(found.largest, value);
    }
  });
  found.largest = Rule::shift(largest_of_lanes(found.largest, L::kLanes));
  packs.forget();
  S sums[2] = {};  // in turn, so that an addition need not wait for the one before it
  for_values([&](int i, S(&values)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      values[j] = Rule::power(values[j], found.largest);
      sums[(i * V + j) % 2] += values[j];
    }
    if constexpr (keeps_powers<L, Rule>()) {
      packs.replace(i, values);
    }
  });
  found.sum = sum_of_lanes(sums[0] + sums[1], L::kLanes);
  return found;
}

/// Writes result(i, j) as element j of the thread's pack i, for those of them that begin in a row of so many columns;
/// zeros from column `seen` on.
template <class L, class Rule, class T, class Result>
__device__ void write_packs(T* row, int columns, int seen, const Result& result) {
  using S = Accumulate<T>;
  const int first = held::opaque(L::first());
  T* const mine = held::opaque(row + first);
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i) {
    if (i * L::kStep < columns - first) {
      S values[L::V];
      result(i, values);
#pragma unroll
      for (int j = 0; j < L::V; ++j) {
        values[j] = Rule::seen_or_zero(values[j], i * L::kStep + j < seen - first);
      }
      const auto pack = rows::pack_of<T>(values);
      if constexpr (sizeof(pack) == 16) {
        rows::store_whole(mine + i * L::kStep, pack);
      } else {
        rows::store(mine + i * L::kStep, pack);
      }
    }
  }
}

/// Writes a row from a thread's packs, which hold its elements or their powers.
template <class L, class T, class Packs, class Rule, class Found>
__device__ void write_row(T* row, const Packs& packs, const Rule& rule, int columns, int seen, const Found& in_warp,
                          const Found& found) {
  using S = typename Packs::S;
  constexpr bool kPowers = keeps_powers<L, Rule>();
  S factor = rule.factor(found.sum);
  if constexpr (kPowers) {
    factor *= found.power(in_warp.largest - found.largest);
  }
  write_packs<L, Rule>(row, columns, seen, [&](int i, S(&values)[L::V]) {
    packs.values(i, values);
#pragma unroll
    for (S& value : values) {
      value = kPowers ? value * factor : rule.held_result(value, found.largest, factor);
    }
  });
}

template <class T, class L, class Rule>
__global__ void __launch_bounds__(L::kThreads, L::least_blocks(HeldPacks<T, L::V, L::kPacks, L::kPacked>::kWords +
                                                               Rule::kExtraWords))
    softmax_held(const T* x, T* y, std::int64_t rows, std::int64_t columns, Rule rule, RowPlan plan, bool last_in_l2) {
  using S = Accumulate<T>;
  using Found = SumExp<S, typename Rule::HeldPower>;
  __shared__ typename held::Exchange<Found, L::kTeam>::Shared shared;

  held::Exchange<Found, L::kTeam> exchange(shared, plan.cluster);
  // 1. Load.
  const Place<L::kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  HeldPacks<T, L::V, L::kPacks, L::kPacked> packs;
  load_packs<L>(packs, x + first, seen, -std::numeric_limits<S>::infinity(), policy_of(last_in_l2));

  // 2. Find.
  const Found in_warp = found_in_warp<L>(packs, rule, seen, Found::nothing());
  const Found found = exchange.joined_warps(in_warp, at.rank);

  // 3. Write.
  packs.forget();
  write_row<L>(y + first, packs, rule, at.columns, seen, in_warp, found);
}

/// Two matrices fill the registers: their elements stay there as they were read, if two of them share one.
template <class T, class L>
using BackwardPacks = HeldPacks<T, L::V, L::kPacks, (sizeof(T) * L::V > 2)>;

template <class T, class L, class Rule>
__global__ void __launch_bounds__(L::kThreads,
                                  L::least_blocks(2 * BackwardPacks<T, L>::kWords + (Rule::kMasked ? 16 : 0)))
    softmax_backward_held(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns, Rule rule,
                          RowPlan plan, bool last_in_l2) {
  using S = Accumulate<T>;
  using Found = PlainSum<S>;
  __shared__ typename held::Exchange<Found, L::kTeam>::Shared shared;

  held::Exchange<Found, L::kTeam> exchange(shared, plan.cluster);
  // 1. Load.
  const Place<L::kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  BackwardPacks<T, L> outs;
  BackwardPacks<T, L> gradients;
  const std::uint64_t policy = policy_of(last_in_l2);
  load_packs<L>(outs, y + first, seen, S{0}, policy);
  load_packs<L>(gradients, dy + first, seen, S{0}, policy);

  // 2. Find.
  const int left = seen - L::first();
  auto found = Found::nothing();
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i) {
    S out[L::V];
    S gradient[L::V];
    outs.values(i, out);
    gradients.values(i, gradient);
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      found.sum += Rule::seen_or_zero(Rule::term(out[j], gradient[j]), i * L::kStep + j < left);
    }
  }
  const S sum = exchange.joined_warps(found.over_lanes(L::kLanes), at.rank).sum;

  // 3. Write.
  outs.forget();
  gradients.forget();
  write_packs<L, Rule>(dx + first, at.columns, seen, [&](int i, S(&gradient)[L::V]) {
    S out[L::V];
    outs.values(i, out);
    gradients.values(i, gradient);
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      gradient[j] = rule.gradient(out[j], gradient[j], sum);
    }
  });
}

}  // namespace mica::kernels::softmax_rows
