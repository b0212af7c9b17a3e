#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include <mica/core/tensor.h>

namespace mica::kernels {

/// The kept and the reduced axes of a reduction from x to y. Each list is sorted by descending stride, omits axes of
/// length 1, merges adjacent axes where possible, and has at least one axis. y is row-major, with length 1 along
/// reduced axes.
struct ReducePlan {
  struct Axis {
    std::int64_t size = 1;
    std::int64_t in = 0;   // stride in x
    std::int64_t out = 0;  // stride in y
  };
  struct Axes {
    std::array<Axis, kMaxRank> axis{};
    int rank = 0;
    std::int64_t numel = 1;

    constexpr const Axis& inner() const { return axis[rank - 1]; }
  };

  Axes kept;
  Axes reduced;

  ReducePlan(const Tensor& x, const Tensor& y) {
    for (int i = 0; i < x.dim(); ++i) {
      if (x.shape()[i] != 1) {
        const bool is_reduced = y.shape()[i] == 1;
        Axes& axes = is_reduced ? reduced : kept;
        axes.axis[axes.rank++] = {x.shape()[i], x.strides()[i], is_reduced ? 0 : y.strides()[i]};
        axes.numel *= x.shape()[i];
      }
    }
    simplify(kept);
    simplify(reduced);
  }

 private:
  static void simplify(Axes& axes) {
    // A stride of 0 sorts as the largest, so that the other axes are traversed in memory order.
    const auto stride = [](const Axis& a) { return a.in == 0 ? std::numeric_limits<std::int64_t>::max() : a.in; };
    std::stable_sort(axes.axis.begin(), axes.axis.begin() + axes.rank,
                     [&](const Axis& a, const Axis& b) { return stride(a) > stride(b); });
    int rank = 0;
    for (int i = 0; i < axes.rank; ++i) {
      const Axis next = axes.axis[i];
      if (rank > 0) {
        Axis& last = axes.axis[rank - 1];
        if (last.in == next.in * next.size && last.out == next.out * next.size) {
          last = {last.size * next.size, next.in, next.out};
          continue;
        }
      }
      axes.axis[rank++] = next;
    }
    if (rank == 0) {
      axes.axis[rank++] = {};
    }
    axes.rank = rank;
  }
};

/// The offsets in x and y of element `index` of the axes, without the `skip` innermost ones.
struct ReduceOffsets {
  std::int64_t in = 0;
  std::int64_t out = 0;

  constexpr ReduceOffsets(const ReducePlan::Axes& axes, std::int64_t index, int skip = 0) {
    for (int i = axes.rank - 1 - skip; i > 0; --i) {
      const ReducePlan::Axis& axis = axes.axis[i];
      const std::int64_t rest = index / axis.size;
      in += (index - rest * axis.size) * axis.in;
      out += (index - rest * axis.size) * axis.out;
      index = rest;
    }
    if (axes.rank > skip) {
      in += index * axes.axis[0].in;
      out += index * axes.axis[0].out;
    }
  }
};

namespace detail {
template <class Op>
struct ShiftTypeOf {
  using type = typename Op::Value;
};
template <class Op>
requires requires { typename Op::Shift; }
struct ShiftTypeOf<Op> {
  using type = typename Op::Shift;
};
}  // namespace detail

/// The type of Op's shift: Op::Shift if it exists, else Op::Value.
template <class Op>
using ShiftOf = typename detail::ShiftTypeOf<Op>::type;

}  // namespace mica::kernels
