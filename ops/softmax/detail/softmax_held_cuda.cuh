#pragma once

// Softmax of rows that fit the registers of those who share them:
//
//     1. a thread loads its packs,
//     2. finds the largest element and the sum of powers of its own; all who share the row join theirs,
//     3. computes its results from the packs, and writes them.
//
// The backward has two matrices, and one sum. kStaged: a block's rows come and go through shared memory, see
// row_team_cuda.cuh, because they are not aligned.

#include <limits>

#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::HeldPacks;
using held::RowPlan;
using held::StagedPiece;
using rows::Pack;

/// A launch's template arguments, but for the types.
template <Team kTeam_, int V_, int kElements_, bool kPacked_, bool kStaged_>
struct HeldLayout {
  static constexpr Team kTeam = kTeam_;
  static constexpr int V = V_;
  static constexpr int kElements = kElements_;  // of a row that a thread has, at most
  static constexpr int kPacks = kElements / V;
  static constexpr bool kPacked = kPacked_;
  static constexpr bool kStaged = kStaged_;
  static constexpr int kThreads =
      kTeam == Team::block || kTeam == Team::cluster ? held::kMostTeamThreads : held::kWarpRows * rows::kWarp;

  __device__ static int column(int i) { return held::held_column<kTeam, V>(i); }

  /// Blocks that are to fit on a multiprocessor, if each thread holds so many words of rows.
  static constexpr int least_blocks(int words) {
    constexpr int kOtherRegisters = kStaged ? 36 : 24;
    return 65536 / (kThreads * ((words + kOtherRegisters + 7) / 8 * 8));
  }
};

/// Whole rows, one after another in memory, that a block has.
struct Tile {
  std::int64_t begin;  // its first element
  int count;

  __device__ Tile(std::int64_t rows, std::int64_t columns) {
    const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y;
    const std::int64_t left = rows - first;
    begin = first * columns;
    count = static_cast<int>((left < blockDim.y ? left : blockDim.y) * columns);
  }
};

/// Loads a thread's packs of a row; `absent` past its end.
template <class L, class Packs, class T, class S>
__device__ void load_packs(Packs& packs, const T* row, int columns, S absent, bool last_in_l2) {
  const std::uint64_t policy = last_in_l2 ? cuda::evict_last() : cuda::evict_normal();
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i) {
    Pack<T, L::V> pack;
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      pack.at[j] = static_cast<T>(absent);
    }
    if (L::column(i) < columns) {
      pack = rows::load_streaming<L::V>(row + L::column(i), policy);
    }
    packs.set(i, pack);
  }
}

/// The same from a row's image in shared memory. Past the row's end, too, it reads something.
template <class L, class Packs, class T, class S>
__device__ void load_words(Packs& packs, const T* row, int columns, S absent) {
  const held::RowWords<T> words(row);
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i) {
    auto word = words.template at<true>(L::column(i));
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      word.at[j] = L::column(i) + j < columns ? word.at[j] : static_cast<T>(absent);
    }
    packs.set(i, word);
  }
}

/// The largest of a warp's elements, and the sum of their powers. The powers replace the elements, if that helps.
template <class L, bool kKeepsPowers, class Packs, class Rule, class Found>
__device__ Found found_in_warp(Packs& packs, const Rule& rule, int seen, Found found) {
  using S = typename Packs::S;
  constexpr int V = L::V;
  const auto for_values = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      S values[V];
      packs.values(i, values);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        values[j] = rule.counted(values[j], L::column(i) + j < seen);
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
  found.largest = largest_of_lanes(found.largest, held::kLanes<L::kTeam>);
  packs.forget();
  for_values([&](int i, S(&values)[V]) {
#pragma unroll
    for (S& value : values) {
      value = found.power(value - found.largest);
      found.sum += value;
    }
    if constexpr (kKeepsPowers) {
      packs.replace(i, values);
    }
  });
  found.sum = sum_of_lanes(found.sum, held::kLanes<L::kTeam>);
  return found;
}

/// Calls f(i, column) for a thread's packs that begin in a row of so many columns. The columns are computed anew: the
/// compiler would keep them in registers from where it needed them before.
template <class L, class F>
__device__ void for_packs(int columns, const F& f) {
  const int step = L::column(1) - L::column(0);
  int column = held::recomputed(L::column(0));
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i, column += step) {
    if (column < columns) {
      f(i, column);
    }
  }
}

/// Stores a pack, or those elements of a word that are in a row of so many columns.
template <class L, class T>
__device__ void store_pack(T* row, int column, int columns, const Pack<T, L::V>& pack) {
  if constexpr (!L::kStaged) {
    rows::store(row + column, pack);
  } else {
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      if (column + j < columns) {
        row[column + j] = pack.at[j];
      }
    }
  }
}

template <class T, class L, class Rule>
__global__ void __launch_bounds__(L::kThreads, L::least_blocks(HeldPacks<T, L::V, L::kPacks, L::kPacked>::kWords +
                                                               Rule::kExtraWords))
    softmax_held(const T* x, T* y, std::int64_t rows, std::int64_t columns, Rule rule, RowPlan plan, bool last_in_l2) {
  using S = Accumulate<T>;
  using Found = SumExp<S, typename Rule::Power>;
  constexpr bool kKeepsPowers = !Rule::kLog && !L::kPacked;
  constexpr S kAbsent = -std::numeric_limits<S>::infinity();
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename held::Exchange<Found, L::kTeam>::Shared shared;

  held::Exchange<Found, L::kTeam> exchange(shared, plan.cluster);
  // 1. Load.
  const Place<L::kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  HeldPacks<T, L::V, L::kPacks, L::kPacked> packs;
  T* staged_row = nullptr;
  if constexpr (L::kStaged) {
    const Tile tile(rows, columns);
    const StagedPiece<T> piece(memory, x + tile.begin, tile.count);
    piece.fetch(x + tile.begin);
    staged_row = piece.image() + (first - tile.begin);
    cuda::wait_copies<0>();
    __syncthreads();
    load_words<L>(packs, staged_row, seen, kAbsent);
  } else {
    load_packs<L>(packs, x + first, seen, kAbsent, last_in_l2);
  }

  // 2. Find.
  const Found in_warp = found_in_warp<L, kKeepsPowers>(packs, rule, seen, Found::nothing());
  const Found found = exchange.joined_warps(in_warp, at.rank);

  // 3. Write.
  S factor = rule.factor(found.sum);
  if constexpr (kKeepsPowers) {
    factor *= found.power(in_warp.largest - found.largest);
  }
  packs.forget();
  if constexpr (L::kStaged) {
    __syncthreads();  // others have read the words in which their rows meet this one
  }
  T* const to = L::kStaged ? staged_row : y + first;
  for_packs<L>(at.columns, [&](int i, int column) {
    S values[L::V];
    packs.values(i, values);
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      values[j] = kKeepsPowers ? values[j] * factor : rule.result(values[j], found.largest, factor);
      values[j] = rule.seen_or_zero(values[j], column + j < seen);
    }
    store_pack<L>(to, column, at.columns, rows::pack_of<T>(values));
  });
  if constexpr (L::kStaged) {
    __syncthreads();
    const Tile tile(rows, columns);
    StagedPiece<T>(memory, y + tile.begin, tile.count).write(y + tile.begin);
  }
}

template <class T, class L, class Rule>
__global__ void __launch_bounds__(L::kThreads, L::least_blocks(2 * HeldPacks<T, L::V, L::kPacks, true>::kWords +
                                                               (Rule::kMasked ? 16 : 0)))
    softmax_backward_held(const T* y, const T* dy, T* dx, std::int64_t rows, std::int64_t columns, Rule rule,
                          RowPlan plan, bool last_in_l2) {
  using S = Accumulate<T>;
  using Found = PlainSum<S>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename held::Exchange<Found, L::kTeam>::Shared shared;

  held::Exchange<Found, L::kTeam> exchange(shared, plan.cluster);
  // 1. Load.
  const Place<L::kTeam> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = rule.seen(at, columns);
  HeldPacks<T, L::V, L::kPacks, true> outs;
  HeldPacks<T, L::V, L::kPacks, true> gradients;
  T* staged_row = nullptr;  // of the gradients, then of the results
  if constexpr (L::kStaged) {
    const Tile tile(rows, columns);
    const StagedPiece<T> piece(memory, y + tile.begin, tile.count);
    const StagedPiece<T> dy_piece(memory + StagedPiece<T>::bytes(tile.count), dy + tile.begin, tile.count);
    piece.fetch(y + tile.begin);
    dy_piece.fetch(dy + tile.begin);
    staged_row = dy_piece.image() + (first - tile.begin);
    cuda::wait_copies<0>();
    __syncthreads();
    load_words<L>(outs, piece.image() + (first - tile.begin), seen, S{0});
    load_words<L>(gradients, staged_row, seen, S{0});
  } else {
    load_packs<L>(outs, y + first, seen, S{0}, last_in_l2);
    load_packs<L>(gradients, dy + first, seen, S{0}, last_in_l2);
  }

  // 2. Find.
  auto found = Found::nothing();
#pragma unroll
  for (int i = 0; i < L::kPacks; ++i) {
    S out[L::V];
    S gradient[L::V];
    outs.values(i, out);
    gradients.values(i, gradient);
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      found.sum += rule.seen_or_zero(Rule::term(out[j], gradient[j]), L::column(i) + j < seen);
    }
  }
  const S sum = exchange.joined(found, at.rank).sum;

  // 3. Write.
  outs.forget();
  gradients.forget();
  if constexpr (L::kStaged) {
    __syncthreads();
  }
  T* const to = L::kStaged ? staged_row : dx + first;
  for_packs<L>(at.columns, [&](int i, int column) {
    S out[L::V];
    S gradient[L::V];
    outs.values(i, out);
    gradients.values(i, gradient);
#pragma unroll
    for (int j = 0; j < L::V; ++j) {
      gradient[j] = rule.seen_or_zero(rule.gradient(out[j], gradient[j], sum), column + j < seen);
    }
    store_pack<L>(to, column, at.columns, rows::pack_of<T>(gradient));
  });
  if constexpr (L::kStaged) {
    __syncthreads();
    const Tile tile(rows, columns);
    StagedPiece<T>(memory + StagedPiece<T>::bytes(tile.count), dx + tile.begin, tile.count).write(dx + tile.begin);
  }
}

}  // namespace mica::kernels::softmax_rows
