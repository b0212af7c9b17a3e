#pragma once

// Softmax of rows that fit into the registers of the threads that share them. Each thread
//
//     1. loads its packs of the row,
//     2. finds the largest of its elements and sums their powers exp(x − largest); then the threads of the row combine
//        their maxima and sums,
//     3. computes its results from the packs and writes them.
//
// Backward loads packs of two matrices, y and dy, and has a single sum. A pack has 16 bytes or, in short rows that are
// not aligned to that, a single element.

#include <limits>

#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::HeldPacks;
using held::RowPlan;
using rows::Pack;

/// The template parameters of a kernel, except for types.
template <Team kTeam_, int V_, int kElements_, bool kPacked_, int kLanes_ = rows::kWarp>
struct HeldLayout {
  static constexpr Team kTeam = kTeam_;
  static constexpr int V = V_;
  static constexpr int kElements = kElements_;  // the most elements of a row that a thread has
  static constexpr int kPacks = kElements / V;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kLanes = kLanes_;    // lanes of a warp that share a row, or a part of one
  static constexpr int kStep = kLanes * V;  // columns from a thread's pack to its next one
  static constexpr bool kWarps = kTeam == Team::block || kTeam == Team::cluster;
  static constexpr int kThreads = kWarps ? held::kMostTeamThreads : held::kWarpRows * rows::kWarp;

  /// The thread's first column. The columns of a warp are adjacent.
  __device__ static int first() {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / kLanes * (kPacks * kLanes) + thread % kLanes) * V;
  }

  /// The number of blocks that should fit on a multiprocessor (__launch_bounds__), if each thread holds `words` words
  /// of rows in registers.
  static constexpr int least_blocks(int words) {
    constexpr int kOtherRegisters = 24;
    return 65536 / (kThreads * ((words + kOtherRegisters + 7) / 8 * 8));
  }
};

/// The same, but compiled for blocks of at most kMostThreads threads, kBlocks of which fit on a multiprocessor.
template <class L, int kMostThreads, int kBlocks>
struct BoundedLayout : L {
  static constexpr int kThreads = kMostThreads;
  static constexpr int least_blocks(int) { return kBlocks; }
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

/// Loads a thread's packs of a row. The kernel reads `elements` elements. Packs past the row's end are filled with
/// `absent`.
template <class L, class Packs, class T, class S>
__device__ void load_packs(Packs& packs, const T* row, int columns, std::int64_t elements, S absent) {
  using P = Pack<T, L::V>;
  // Loaded as words. With single elements, the compiler would wait for each load, to move its elements one by one,
  // before it issues the next one.
  using Words = std::conditional_t<sizeof(P) == 16, uint4, P>;
  const P past = pack_of_one<L::V>(static_cast<T>(absent));
  const T* const mine = row + L::first();
  const int left = columns - L::first();
  [[maybe_unused]] const std::uint64_t policy = cuda::read_once_policy(elements * static_cast<int>(sizeof(T)));
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

/// Whether the powers exp(x − largest) replace the elements x in registers.
template <class L, class Rule>
constexpr bool keeps_powers() {
  return !Rule::kLog && !L::kPacked;
}

/// The largest of a warp's elements and the sum of their powers. If keeps_powers(), the powers replace the elements.
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
  S sums[2] = {};  // take turns, so that consecutive additions do not depend on each other
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

/// Writes the thread's packs of a row with `columns` columns. result(i, values) computes pack number i. Masked rows get
/// zeros from column `seen` on.
template <class L, class Rule, class T, class Result>
__device__ void write_packs(T* row, int columns, int seen, const Result& result) {
  using S = Accumulate<T>;
  const int first = rows::opaque(L::first());
  T* const mine = rows::opaque(row + first);
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

/// Computes and writes a thread's results of softmax from its packs, which hold elements or their powers.
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
    softmax_held(const T* x, T* y, std::int64_t rows, std::int64_t columns, Rule rule, RowPlan plan) {
  using S = Accumulate<T>;
  using Found = SumExp<S, typename Rule::HeldPower>;
  __shared__ typename held::Exchange<Found, L::kTeam>::Shared shared;

  held::Exchange<Found, L::kTeam> exchange(shared, plan.cluster);
  // 1. Load.
  const Place<L::kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  HeldPacks<T, L::V, L::kPacks, L::kPacked> packs;
  load_packs<L>(packs, x + first, seen, rows * columns, -std::numeric_limits<S>::infinity());

  // 2. Reduce.
  const Found in_warp = found_in_warp<L>(packs, rule, seen, Found::nothing());
  const Found found = exchange.joined_warps(in_warp, at.rank);

  // 3. Write.
  packs.forget();
  write_row<L>(y + first, packs, rule, at.columns, seen, in_warp, found);
}

/// Backward holds two matrices in registers. To save registers, elements of 16 bits stay unconverted, if packs have
/// several of them.
template <class T, class L>
using BackwardPacks = HeldPacks<T, L::V, L::kPacks, (sizeof(T) * L::V > 2)>;

template <class T, class L, class Rule>
__global__ void __launch_bounds__(L::kThreads,
                                  L::least_blocks(2 * BackwardPacks<T, L>::kWords + (Rule::kMasked ? 16 : 0)))
    softmax_backward_held(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns, Rule rule,
                          RowPlan plan) {
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
  load_packs<L>(outs, y + first, seen, 2 * rows * columns, S{0});
  load_packs<L>(gradients, dy + first, seen, 2 * rows * columns, S{0});

  // 2. Reduce.
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
