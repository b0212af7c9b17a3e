#pragma once

// Softmax of rows that fit into the registers of the threads that share them: lanes of a warp, a block or a cluster.
// Each thread
//
//     1. loads its packs of the row (16 bytes each, or single elements of short rows that are not aligned to that),
//     2. reduces them; then the threads of the row combine their results,
//     3. computes its part of the results from the packs and writes them.
//
// Forward reduces to the largest element and the sum of powers exp(x − largest). Backward has packs of two matrices, y
// and dy, and a single sum.

#include <limits>

#include <mica/ops/softmax/detail/softmax_plan.h>
#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::HeldPacks;
using held::RowPlan;
using rows::Pack;

/// An entry of kSoftmaxLayouts, for elements of T.
template <class T, int kIndex>
struct Layout {
  static constexpr SoftmaxLayout kEntry = kSoftmaxLayouts[kIndex];
  static constexpr Team kTeam = kEntry.team;
  static constexpr int V = kEntry.packs ? 16 / sizeof(T) : 1;
  static constexpr int kPacks = kEntry.elements / V;
  static constexpr bool kPacked = kEntry.packed;
  static constexpr int kLanes = kEntry.lanes;
  static constexpr int kStep = kLanes * V;  // columns from a thread's pack to its next one
  static constexpr int kThreads = kEntry.threads;

  /// The thread's first column. The columns of a warp are adjacent.
  __device__ static int first() {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / kLanes * (kPacks * kLanes) + thread % kLanes) * V;
  }

  /// The number of blocks that should fit on a multiprocessor (__launch_bounds__), if each thread holds `words` words
  /// of rows in registers.
  static constexpr int least_blocks(int words) {
    constexpr int kOtherRegisters = 24;
    return kEntry.blocks != 0 ? kEntry.blocks : 65536 / (kThreads * ((words + kOtherRegisters + 7) / 8 * 8));
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

/// A thread's packs of a row of x. Unless they are packed, the powers exp(x − largest) of softmax replace the elements.
template <class Forward, class L>
struct ForwardPacks {
  using T = typename Forward::T;
  using S = Accumulate<T>;
  using Found = typename Forward::Found;
  using Packs = HeldPacks<T, L::V, L::kPacks, L::kPacked>;
  static constexpr int V = L::V;
  static constexpr int kWords = Packs::kWords + (Forward::kLog || Forward::kMasked ? 16 : 0);
  static constexpr bool kKeepsPowers = !Forward::kLog && !L::kPacked;

  Packs packs;

  __device__ void load(const Matrices<T, 1>& m, std::int64_t first, int seen, std::int64_t elements) {
    load_packs<L>(packs, m.in[0] + first, seen, elements, -std::numeric_limits<S>::infinity());
  }
  __device__ void forget() { packs.forget(); }

  /// The largest of a warp's elements and the sum of their powers.
  __device__ Found reduced(const Forward& rule, int seen) {
    auto found = Found::nothing();
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
    found.largest = Forward::shift(largest_of_lanes(found.largest, L::kLanes));
    packs.forget();
    S sums[2] = {};  // take turns, so that consecutive additions do not depend on each other
    for_values([&](int i, S(&values)[V]) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        values[j] = Forward::power(values[j], found.largest);
        sums[(i * V + j) % 2] += values[j];
      }
      if constexpr (kKeepsPowers) {
        packs.replace(i, values);
      }
    });
    found.sum = sum_of_lanes(sums[0] + sums[1], L::kLanes);
    return found;
  }

  /// in_warp: what reduced() has returned. found: the same for the whole row.
  __device__ void write(T* row, const Forward& rule, int columns, int seen, const Found& in_warp,
                        const Found& found) const {
    S factor = rule.factor(found.sum);
    if constexpr (kKeepsPowers) {
      factor *= found.power(in_warp.largest - found.largest);
    }
    write_packs<L, Forward>(row, columns, seen, [&](int i, S(&values)[V]) {
      packs.values(i, values);
#pragma unroll
      for (S& value : values) {
        value = kKeepsPowers ? value * factor : rule.result(value, found.largest, factor);
      }
    });
  }
};

/// A thread's packs of a row of y and of dy. To save registers, elements of 16 bits stay unconverted, if packs have
/// several of them.
template <class Backward, class L>
struct BackwardPacks {
  using T = typename Backward::T;
  using S = Accumulate<T>;
  using Found = typename Backward::Found;
  using Packs = HeldPacks<T, L::V, L::kPacks, (sizeof(T) * L::V > 2)>;
  static constexpr int V = L::V;
  static constexpr int kWords = 2 * Packs::kWords + (Backward::kMasked ? 16 : 0);

  Packs outs;
  Packs gradients;

  __device__ void load(const Matrices<T, 2>& m, std::int64_t first, int seen, std::int64_t elements) {
    load_packs<L>(outs, m.in[0] + first, seen, elements, S{0});
    load_packs<L>(gradients, m.in[1] + first, seen, elements, S{0});
  }
  __device__ void forget() {
    outs.forget();
    gradients.forget();
  }

  __device__ Found reduced(const Backward&, int seen) const {
    const int left = seen - L::first();
    auto found = Found::nothing();
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      S out[V];
      S gradient[V];
      outs.values(i, out);
      gradients.values(i, gradient);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        found.sum += Backward::seen_or_zero(Backward::term(out[j], gradient[j]), i * L::kStep + j < left);
      }
    }
    return found.over_lanes(L::kLanes);
  }

  __device__ void write(T* row, const Backward& rule, int columns, int seen, const Found&, const Found& found) const {
    write_packs<L, Backward>(row, columns, seen, [&](int i, S(&gradient)[V]) {
      S out[V];
      outs.values(i, out);
      gradients.values(i, gradient);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        gradient[j] = rule.gradient(out[j], gradient[j], found.sum);
      }
    });
  }
};

template <class Direction, class L>
using PacksOf = std::conditional_t<Direction::kBackward, BackwardPacks<Direction, L>, ForwardPacks<Direction, L>>;

template <class Direction, class L>
__global__ void __launch_bounds__(L::kThreads, L::least_blocks(PacksOf<Direction, L>::kWords))
    softmax_held(typename Direction::Inputs m, std::int64_t rows, std::int64_t columns, Direction direction,
                 RowPlan plan) {
  using Found = typename Direction::Found;
  __shared__ typename held::Exchange<Found, L::kTeam>::Shared shared;

  held::Exchange<Found, L::kTeam> exchange(shared, plan.cluster);
  const Place<L::kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = direction.seen(at, columns);
  PacksOf<Direction, L> packs;
  packs.load(m, first, seen, m.kInputs * rows * columns);

  const Found in_warp = packs.reduced(direction, seen);
  const Found found = exchange.joined_warps(in_warp, at.rank);

  packs.forget();
  packs.write(m.out + first, direction, at.columns, seen, in_warp, found);
}

}  // namespace mica::kernels::softmax_rows
