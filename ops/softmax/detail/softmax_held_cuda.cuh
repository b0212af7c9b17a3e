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

using rows::RowTile;

/// An entry of kSoftmaxLayouts, for elements of T.
template <class T, int kIndex>
struct Layout {
  static constexpr SoftmaxLayout kEntry = kSoftmaxLayouts[kIndex];
  static constexpr Group kGroup = kEntry.group;
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

/// A thread's packs of a row of each input.
///
/// In forward, unless the packs are packed, the powers exp(x − largest) of softmax replace the elements. In backward,
/// elements of 16 bits stay unconverted, if packs have several of them, to save registers.
template <class Direction, class L>
class HeldRow {
  using T = typename Direction::T;
  using S = Accumulate<T>;
  using Found = typename Direction::Found;
  static constexpr int V = L::V;
  static constexpr int kInputs = Direction::Inputs::kInputs;
  static constexpr bool kBackward = Direction::kBackward;
  static constexpr bool kKeepsPowers = !kBackward && !Direction::kLog && !L::kPacked;
  using Packs = RowTile<T, V, L::kPacks, kBackward ? (sizeof(T) * V > 2) : L::kPacked>;

 public:
  static constexpr int kWords =
      kInputs * Packs::kWords + (Direction::kMasked || (Direction::kLog && !kBackward) ? 16 : 0);

  /// The matrix has `elements` elements.
  __device__ void load(const typename Direction::Inputs& m, std::int64_t first, int seen, std::int64_t elements) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      load_packs<L>(packs_[k], m.in[k] + first, seen, elements, Direction::kAbsent);
    }
  }
  __device__ Packs& packs() { return packs_[0]; }

  __device__ void forget() {
#pragma unroll
    for (Packs& packs : packs_) {
      packs.forget();
    }
  }

  /// The reduction of a warp's, or of the row's lanes', elements.
  __device__ Found reduced(const Direction& direction, int seen) {
    const int left = seen - L::first();
    auto found = Found::nothing();
    if constexpr (kBackward) {
      for_packs([&](int i, const Element(&elements)[V]) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          found.sum +=
              Direction::seen_or_zero(Direction::term(elements[j].at[0], elements[j].at[1]), i * L::kStep + j < left);
        }
      });
      return found.template over_lanes<L::kLanes>();
    } else {
      const auto counted = [&](int i, int j, const Element& element) {
        return direction.counted(element.at[0], i * L::kStep + j < left);
      };
      for_packs([&](int i, const Element(&elements)[V]) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          found.largest = larger(found.largest, counted(i, j, elements[j]));
        }
      });
      found.largest = Direction::shift(largest_of_lanes(found.largest, L::kLanes));
      forget();
      S sums[2] = {};  // take turns, so that consecutive additions do not depend on each other
      for_packs([&](int i, const Element(&elements)[V]) {
        S powers[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          powers[j] = Direction::power(counted(i, j, elements[j]), found.largest);
          sums[(i * V + j) % 2] += powers[j];
        }
        if constexpr (kKeepsPowers) {
          packs_[0].replace(i, powers);
        }
      });
      found.sum = sum_of_lanes(sums[0] + sums[1], L::kLanes);
      return found;
    }
  }

  /// Writes the results of a row with `columns` columns. Masked rows get zeros from column `seen` on. in_warp: what
  /// reduced() has returned. found: the same for the whole row.
  __device__ void write(T* row, const Direction& direction, int columns, int seen, const Found& in_warp,
                        const Found& found) const {
    S prepared = direction.prepared(found);
    if constexpr (kKeepsPowers) {
      prepared *= found.power(in_warp.largest - found.largest);
    }
    const int first = rows::opaque(L::first());
    T* const mine = rows::opaque(row + first);
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      if (i * L::kStep < columns - first) {
        Element elements[V];
        read(i, elements);
        S values[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const S value = kKeepsPowers ? elements[j].at[0] * prepared : direction.write(elements[j], found, prepared);
          values[j] = Direction::seen_or_zero(value, i * L::kStep + j < seen - first);
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

 private:
  using Element = typename Direction::Element;

  /// The elements of pack number i.
  __device__ void read(int i, Element (&elements)[V]) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      S values[V];
      packs_[k].values(i, values);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        elements[j].at[k] = values[j];
      }
    }
  }
  template <class F>
  __device__ void for_packs(const F& f) const {
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      Element elements[V];
      read(i, elements);
      f(i, elements);
    }
  }

  Packs packs_[kInputs];
};

template <class Direction, class L>
__global__ void __launch_bounds__(L::kThreads, L::least_blocks(HeldRow<Direction, L>::kWords))
    softmax_held(typename Direction::Inputs m, std::int64_t rows, std::int64_t columns, Direction direction,
                 RowPlan plan) {
  using Found = typename Direction::Found;
  using Threads = rows::RowGroup<Found, L::kGroup>;
  __shared__ typename Threads::Shared shared;

  Threads threads(shared, plan.cluster);
  const Place<L::kGroup> at(plan, rows, columns);
  const std::int64_t first = at.row * columns + at.begin;
  const int seen = direction.seen(at, columns);
  HeldRow<Direction, L> row;
  row.load(m, first, seen, m.kInputs * rows * columns);

  const Found in_warp = row.reduced(direction, seen);
  const Found found = threads.reduce_warps(in_warp);

  row.forget();
  row.write(m.out + first, direction, at.columns, seen, in_warp, found);
}

}  // namespace mica::kernels::softmax_rows
