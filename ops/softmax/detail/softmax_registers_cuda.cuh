#pragma once

// Softmax of rows that fit into the registers of the threads that share them: lanes of a warp, a block or a cluster.
// Each thread
//
//     1. loads its packs of the row, 16 bytes each,
//     2. reduces them; then the threads of the row combine their results,
//     3. computes its part of the results from the packs and writes them.
//
// Forward reduces to the largest element and the sum of powers exp(x − largest). Backward has packs of two matrices, y
// and dy, and a single sum.

#include <mica/ops/softmax/detail/softmax_plan.h>
#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

/// An entry of kSoftmaxLayouts, for elements of T.
template <class T, int kIndex>
struct LayoutEntry {
  static constexpr SoftmaxLayout kEntry = kSoftmaxLayouts[kIndex];
  static constexpr Group kGroup = kEntry.group;
  static constexpr int V = 16 / sizeof(T);
  static constexpr int kPacks = kEntry.elements / V;
  static constexpr int kLanes = kEntry.lanes;
  static constexpr int kStep = kLanes * V;  // columns from a thread's pack to its next one

  /// The number of blocks that should fit on a multiprocessor (__launch_bounds__), if each thread has `words` words of
  /// rows in registers.
  static constexpr int least_blocks(int words) {
    constexpr int kOtherRegisters = 24;
    return kEntry.blocks != 0 ? kEntry.blocks : 65536 / (kEntry.threads * ((words + kOtherRegisters + 7) / 8 * 8));
  }
};

/// The row of a block, or of a group of its threads, and the columns of it that they have.
template <Group kGroup>
struct RowSlab {
  std::int64_t row;
  std::int64_t begin;  // the first column
  int columns;         // how many; 0: the thread has no row
  int seen;            // how many of them are not masked

  template <class Rule>
  __device__ RowSlab(const SoftmaxPlan& plan, std::int64_t rows, std::int64_t row_columns, const Rule& rule) {
    if constexpr (kGroup == Group::cluster) {
      row = blockIdx.x / plan.cluster;
      begin = std::int64_t{cuda::cluster_rank()} * plan.slab;
    } else {
      row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
      begin = 0;
    }
    const std::int64_t left = row_columns - begin;
    columns = row >= rows || left <= 0 ? 0 : static_cast<int>(left < plan.slab ? left : plan.slab);
    seen = columns;
    if constexpr (Rule::kMasked) {
      const std::int64_t seen_left = max(std::int64_t{0}, rule.seen(row, row_columns) - begin);
      seen = static_cast<int>(min(seen_left, std::int64_t{columns}));
    }
  }
};

/// A thread's packs of a row of each input. In forward, unless they are packed, the powers exp(x − largest) of softmax
/// replace the elements.
template <class Direction, class L>
class RegisterRow {
  using T = typename Direction::T;
  using S = Accumulate<T>;
  using Found = typename Direction::Found;
  static constexpr int V = L::V;
  static constexpr int kInputs = Direction::Inputs::kInputs;
  static constexpr bool kBackward = Direction::kBackward;
  static constexpr bool kKeepsPowers = !kBackward && !Direction::kLog && !L::kEntry.packed;
  using Packs = rows::RowTile<T, V, L::kPacks, kBackward || L::kEntry.packed>;

 public:
  static constexpr int kWords =
      kInputs * Packs::kWords + (Direction::kMasked || (Direction::kLog && !kBackward) ? 16 : 0);

  __device__ static int first() { return Packs::template first_column<L::kLanes>(); }  // the thread's first column

  /// Loads the packs of the first `seen` columns of a slab, which begins at index `begin`; the others are absent. The
  /// kernel reads `elements` elements in all.
  __device__ void load(const typename Direction::Inputs& m, std::int64_t begin, int seen, std::int64_t elements) {
    const std::uint64_t policy = cuda::read_once_policy(elements * static_cast<int>(sizeof(T)));
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      packs_[k].template load<L::kStep>(m.in[k] + begin + first(), seen - first(), policy,
                                        static_cast<T>(Direction::kAbsent));
    }
  }
  __device__ Packs& packs() { return packs_[0]; }

  __device__ void forget() {
#pragma unroll
    for (Packs& packs : packs_) {
      packs.forget();
    }
  }

  /// The reduction over the lanes of a warp that share the row.
  __device__ Found reduced(const Direction& direction, int seen) {
    const int left = seen - first();
    auto found = Found::nothing();
    if constexpr (kBackward) {
      for_packs([&](int i, const Element(&elements)[V]) {
        direction.add(found, elements, [&](int j) { return i * L::kStep + j < left; });
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

  /// Writes the results of a row with `columns` columns; masked rows get zeros from column `seen` on. in_warp is what
  /// reduced() has returned, found the same for the whole row.
  __device__ void write(T* row, const Direction& direction, int columns, int seen, const Found& in_warp,
                        const Found& found) const {
    S prepared = direction.prepared(found);
    if constexpr (kKeepsPowers) {
      prepared *= found.power(in_warp.largest - found.largest);
    }
    const int begin = rows::opaque(first());
    T* const mine = rows::opaque(row + begin);
    for_packs([&](int i, const Element(&elements)[V]) {
      if (i * L::kStep < columns - begin) {
        S values[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const S value = kKeepsPowers ? elements[j].at[0] * prepared : direction.write(elements[j], found, prepared);
          values[j] = Direction::seen_or_zero(value, i * L::kStep + j < seen - begin);
        }
        rows::store_whole(mine + i * L::kStep, rows::pack_of<T>(values));
      }
    });
  }

 private:
  using Element = typename Direction::Element;

  /// Calls f(i, elements) for each pack i.
  template <class F>
  __device__ void for_packs(const F& f) const {
#pragma unroll
    for (int i = 0; i < L::kPacks; ++i) {
      Element elements[V];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        S values[V];
        packs_[k].values(i, values);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          elements[j].at[k] = values[j];
        }
      }
      f(i, elements);
    }
  }

  Packs packs_[kInputs];
};

template <class Direction, class L>
__global__ void __launch_bounds__(L::kEntry.threads, L::least_blocks(RegisterRow<Direction, L>::kWords))
    softmax_registers(typename Direction::Inputs m, std::int64_t rows, std::int64_t columns, Direction direction,
                      SoftmaxPlan plan) {
  using Found = typename Direction::Found;
  using Threads = rows::RowGroup<Found, L::kGroup>;
  __shared__ typename Threads::Exchange exchange;

  Threads threads(exchange, plan.cluster);
  const RowSlab<L::kGroup> at(plan, rows, columns, direction);
  const std::int64_t first = at.row * columns + at.begin;
  RegisterRow<Direction, L> row;
  row.load(m, first, at.seen, m.kInputs * rows * columns);

  const Found in_warp = row.reduced(direction, at.seen);
  const Found found = threads.reduce_warps(in_warp);

  row.forget();
  row.write(m.out + first, direction, at.columns, at.seen, in_warp, found);
}

}  // namespace mica::kernels::softmax_rows
