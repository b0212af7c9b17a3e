#pragma once

// Reductions on the CPU. Included by *_cpu.cpp only.
//
// The order of summation depends only on the lengths and strides of the reduced axes: leaves with a bounded number of
// elements are combined pairwise into groups, and groups pairwise into the result. Threads take whole groups, so their
// number does not affect the result, and the error grows with the logarithm of the length.

#include <algorithm>
#include <array>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/ops/reduce/reduce_plan.h>

namespace mica::kernels {

namespace detail {

inline constexpr std::int64_t kReduceGrain = 16384;  // elements per thread, at least

/// Combines a sequence of partial results, of any length, in a balanced tree.
template <class Op>
class Cascade {
 public:
  using Acc = typename Op::Acc;
  explicit Cascade(const Op& op) : op_(op) {}

  void push(Acc value) {
    for (std::uint64_t n = count_++; n & 1; n >>= 1) {
      value = op_.combine(levels_[--depth_], value);
    }
    levels_[depth_++] = value;
  }
  Acc result() const {
    if (depth_ == 0) {
      return Op::identity();
    }
    Acc value = levels_[depth_ - 1];
    for (int i = depth_ - 2; i >= 0; --i) {
      value = op_.combine(levels_[i], value);
    }
    return value;
  }

 private:
  const Op& op_;
  std::array<Acc, 48> levels_;
  int depth_ = 0;
  std::uint64_t count_ = 0;
};

/// Reduces one leaf: n elements, `stride` apart, the first at position `first`. kUnit: the stride is known to be 1, so
/// that the loop vectorizes. Not inlined, like the combination of tiles: inlining takes 50 % more compile time and
/// gains nothing.
template <class T, class Op, bool kUnit>
[[gnu::noinline]] typename Op::Acc reduce_leaf(const Op& op, const T* x, std::int64_t n, std::int64_t stride,
                                               ShiftOf<Op> shift, std::int64_t first) {
  using Acc = typename Op::Acc;
  using Value = typename Op::Value;
  const auto at = [&](std::int64_t i) {
    return op.map(static_cast<Value>(x[kUnit ? i : i * stride]), shift, first + i);
  };
  constexpr int kLanes = 256 / sizeof(Acc);
  std::int64_t i = 0;
  Acc result = Op::identity();
  if (n >= kLanes) {
    Acc lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = at(lane);
    }
    for (i = kLanes; i + kLanes <= n; i += kLanes) {
      MICA_INDEPENDENT
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = op.combine(lanes[lane], at(i + lane));
      }
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) {
        lanes[lane] = op.combine(lanes[lane], lanes[lane + width]);
      }
    }
    result = lanes[0];
  }
  for (; i < n; ++i) {
    result = op.combine(result, at(i));
  }
  return result;
}

/// Reduces one result after the other, for results whose elements are adjacent in memory.
template <class T, class Op, class Shifts>
void reduce_rows(const Op& op, const ReducePlan& plan, const T* x, const Shifts& shifts, typename Op::Out* y) {
  using Acc = typename Op::Acc;
  using Shift = ShiftOf<Op>;
  constexpr std::int64_t kLeaf = 4096;
  constexpr std::int64_t kGroup = 65536;
  const ReducePlan::Axis& run = plan.reduced.inner();
  const std::int64_t leaves_per_run = (run.size + kLeaf - 1) / kLeaf;
  const std::int64_t leaves = run.size == 0 ? 0 : plan.reduced.numel / run.size * leaves_per_run;
  const std::int64_t group = std::max<std::int64_t>(kGroup / std::clamp<std::int64_t>(run.size, 1, kLeaf), 1);
  const std::int64_t groups = std::max<std::int64_t>((leaves + group - 1) / group, 1);

  // Reduces the leaves of a group.
  const auto reduce_group = [&](std::int64_t which, std::int64_t in, Shift row_shift) {
    Cascade<Op> cascade(op);
    const std::int64_t end = std::min(leaves, (which + 1) * group);
    for (std::int64_t leaf = which * group; leaf < end; ++leaf) {
      const std::int64_t run_index = leaf / leaves_per_run;
      const std::int64_t start = leaf % leaves_per_run * kLeaf;
      const T* from = x + in + ReduceOffsets(plan.reduced, run_index, 1).in + start * run.in;
      const std::int64_t n = std::min(kLeaf, run.size - start);
      const std::int64_t position = run_index * run.size + start;
      cascade.push(run.in == 1 ? reduce_leaf<T, Op, true>(op, from, n, 1, row_shift, position)
                               : reduce_leaf<T, Op, false>(op, from, n, run.in, row_shift, position));
    }
    return cascade.result();
  };
  const auto shift_at = [&](std::int64_t out) {
    if constexpr (Op::kShifted) {
      return static_cast<Shift>(shifts[out]);
    } else {
      return Shift{};
    }
  };

  const std::int64_t rows = plan.kept.numel;
  if (groups == 1) {
    const std::int64_t grain = std::max<std::int64_t>(kReduceGrain / std::max<std::int64_t>(plan.reduced.numel, 1), 1);
    parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const ReduceOffsets at(plan.kept, row);
        const Shift row_shift = shift_at(at.out);
        y[at.out] = static_cast<typename Op::Out>(op.finish(reduce_group(0, at.in, row_shift), row_shift));
      }
    });
    return;
  }
  std::vector<Acc> partials(rows * groups);
  parallel_for(rows * groups, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const ReduceOffsets at(plan.kept, i / groups);
      partials[i] = reduce_group(i % groups, at.in, shift_at(at.out));
    }
  });
  for (std::int64_t row = 0; row < rows; ++row) {
    const ReduceOffsets at(plan.kept, row);
    Cascade<Op> cascade(op);
    for (std::int64_t i = 0; i < groups; ++i) {
      cascade.push(partials[row * groups + i]);
    }
    y[at.out] = static_cast<typename Op::Out>(op.finish(cascade.result(), shift_at(at.out)));
  }
}

/// A reduction of a tile of columns.
template <class Op>
struct TileOp {
  static constexpr std::int64_t kTile = 256;  // columns
  using Acc = std::array<typename Op::Acc, kTile>;

  Op op;
  std::int64_t width;  // columns in use

  static Acc identity() {
    Acc tile;
    tile.fill(Op::identity());
    return tile;
  }
  [[gnu::noinline]] Acc combine(const Acc& a, const Acc& b) const {
    Acc joined;
    for (std::int64_t c = 0; c < width; ++c) {
      joined[c] = op.combine(a[c], b[c]);
    }
    return joined;
  }
};

/// Reduces tiles of columns row by row, for results that are adjacent in memory while their elements are not. The
/// innermost kept axis has stride 1 in x.
template <class T, class Op, class Shifts>
void reduce_columns(const Op& op, const ReducePlan& plan, const T* x, const Shifts& all_shifts, typename Op::Out* y) {
  using Value = typename Op::Value;
  constexpr std::int64_t kTile = TileOp<Op>::kTile;
  constexpr std::int64_t kLeaf = 32;  // rows
  constexpr std::int64_t kMaxGroups = 64;
  using Tile = typename TileOp<Op>::Acc;
  using TileShifts = std::array<ShiftOf<Op>, kTile>;

  const ReducePlan::Axis columns = plan.kept.inner();
  const TileOp<Op> tile_op{op, std::min(kTile, columns.size)};
  const std::int64_t rows = plan.reduced.numel;
  const std::int64_t group = std::max<std::int64_t>((rows / kMaxGroups + kLeaf - 1) / kLeaf * kLeaf, 4 * kLeaf);
  const std::int64_t groups = std::max<std::int64_t>((rows + group - 1) / group, 1);
  const std::int64_t tiles = (columns.size + kTile - 1) / kTile;
  const std::int64_t outer = plan.kept.numel / columns.size;

  // Reduces rows [begin, end) of `width` columns, starting at `base`.
  const auto reduce_leaf_of = [&](const T* base, std::int64_t begin, std::int64_t end, std::int64_t width,
                                  const TileShifts& shifts) {
    Tile tile = TileOp<Op>::identity();
    const auto value = [&](const T* from, std::int64_t i, std::int64_t position) {
      return op.map(static_cast<Value>(from[i]), shifts[i], position);
    };
    const auto row_at = [&](std::int64_t row) { return base + ReduceOffsets(plan.reduced, row).in; };
    std::int64_t row = begin;
    for (; row + 4 <= end; row += 4) {
      const T *a = row_at(row), *b = row_at(row + 1), *c = row_at(row + 2), *d = row_at(row + 3);
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < width; ++i) {
        tile[i] = op.combine(tile[i], op.combine(op.combine(value(a, i, row), value(b, i, row + 1)),
                                                 op.combine(value(c, i, row + 2), value(d, i, row + 3))));
      }
    }
    for (; row < end; ++row) {
      const T* a = row_at(row);
      for (std::int64_t i = 0; i < width; ++i) {
        tile[i] = op.combine(tile[i], value(a, i, row));
      }
    }
    return tile;
  };
  struct Place {
    std::int64_t in, out, width;
  };
  const auto place_of = [&](std::int64_t block) {
    const ReduceOffsets at(plan.kept, block / tiles, 1);
    const std::int64_t first = block % tiles * kTile;
    return Place{at.in + first, at.out + first * columns.out, std::min(kTile, columns.size - first)};
  };
  const auto shifts_at = [&](const Place& place) {
    TileShifts shifts{};
    if constexpr (Op::kShifted) {
      for (std::int64_t i = 0; i < place.width; ++i) {
        shifts[i] = static_cast<ShiftOf<Op>>(all_shifts[place.out + i * columns.out]);
      }
    }
    return shifts;
  };
  const auto write = [&](const Place& place, const Tile& tile) {
    const TileShifts shifts = shifts_at(place);
    for (std::int64_t i = 0; i < place.width; ++i) {
      y[place.out + i * columns.out] = static_cast<typename Op::Out>(op.finish(tile[i], shifts[i]));
    }
  };

  const std::int64_t blocks = outer * tiles;
  std::vector<Tile> partials(groups > 1 ? blocks * groups : 0);
  const std::int64_t work = std::max<std::int64_t>(std::min(rows, group) * std::min(columns.size, kTile), 1);
  parallel_for(blocks * groups, std::max<std::int64_t>(kReduceGrain / work, 1),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const Place place = place_of(i / groups);
                   const TileShifts shifts = shifts_at(place);
                   const std::int64_t first = i % groups * group;
                   const std::int64_t last = std::min(rows, first + group);
                   Cascade<TileOp<Op>> cascade(tile_op);
                   for (std::int64_t row = first; row < last; row += kLeaf) {
                     cascade.push(reduce_leaf_of(x + place.in, row, std::min(last, row + kLeaf), place.width, shifts));
                   }
                   if (groups == 1) {
                     write(place, cascade.result());
                   } else {
                     partials[i] = cascade.result();
                   }
                 }
               });
  if (groups > 1) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      Cascade<TileOp<Op>> cascade(tile_op);
      for (std::int64_t i = 0; i < groups; ++i) {
        cascade.push(partials[block * groups + i]);
      }
      write(place_of(block), cascade.result());
    }
  }
}

}  // namespace detail

/// y = op over the axes of x that have length 1 in y. shifts[i], if the op has shifts, is that of y's element i in
/// row-major order.
template <class T, class Op, class Shifts = const typename Op::Value*>
void reduce(Cpu, const Op& op, const Tensor& x, const Tensor& y, const Shifts& shifts = {}) {
  if (y.numel() == 0) {
    return;
  }
  const ReducePlan plan(x, y);
  using Out = typename Op::Out;
  const bool side_by_side = plan.kept.inner().in == 1 && plan.kept.inner().size >= 8;
  if (side_by_side && plan.reduced.inner().in != 1) {
    detail::reduce_columns(op, plan, x.data<T>(), shifts, y.data<Out>());
  } else {
    detail::reduce_rows(op, plan, x.data<T>(), shifts, y.data<Out>());
  }
}

}  // namespace mica::kernels
