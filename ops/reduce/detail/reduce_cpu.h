#pragma once

// Reductions on the CPU. Included by *_cpu.cpp only.
//
// The order of summation depends only on the lengths and strides of the reduced axes: leaves with a bounded number of
// elements are combined pairwise into groups, and groups pairwise into the result. Threads take whole groups, so their
// number does not affect the result, and the error grows with the logarithm of the length.
//
// The inner steps (TypedSteps) are compiled for each op and type, the loops around them once, in reduce_loops_cpu.cpp.
// Elements of other dtypes are first converted into a buffer in the L1 cache.

#include <algorithm>
#include <array>
#include <cstddef>

#include <mica/core/detail/blocks_cpu.h>
#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/ops/reduce/detail/reduce_plan.h>

namespace mica::kernels {

namespace detail {

/// The number of columns that are reduced together.
inline constexpr std::int64_t kReduceTile = 256;
/// The maximum size of an accumulator, in bytes.
inline constexpr std::int64_t kAccBytes = 8;
/// The maximum size of a shift, in bytes.
inline constexpr std::int64_t kShiftBytes = 16;
/// The maximum size of a result, in bytes.
inline constexpr std::int64_t kOutBytes = 8;

/// The steps of a reduction, with types erased. Accumulators are arrays of `width` elements.
class ReduceSteps {
 public:
  ReduceSteps(DType value, DType out, std::int64_t acc_bytes) : value(value), out(out), acc_bytes(acc_bytes) {}

  /// The dtypes of the values that rows() and columns() read, and of the results that finish() writes.
  const DType value, out;
  const std::int64_t acc_bytes;

  virtual void identity(void* acc, std::int64_t width) const = 0;
  /// left[i] = combine(left[i], right[i])
  virtual void combine(void* left, const void* right, std::int64_t width) const = 0;
  /// Combines `count` accumulators, a power of two, pairwise: neighbors, then the results' neighbors, and so on. The
  /// result is at acc[0].
  virtual void fold(void* acc, std::int64_t count) const = 0;
  /// acc[i] = row i of the patch, reduced. Row i belongs to result number out + i · out_step; its first value is
  /// element number first + i · first_step of that result's elements.
  virtual void rows(const void* values, const Patch& patch, std::int64_t out, std::int64_t out_step, std::int64_t first,
                    std::int64_t first_step, void* acc) const = 0;
  /// Loads the shifts of results out, out + stride, ….
  virtual void load_shifts(std::int64_t out, std::int64_t stride, std::int64_t width, void* shifts) const = 0;
  /// acc[i] = combine(acc[i], value i of each row). `count` is 1 or 4; the first row has element number `first` of each
  /// result's elements.
  virtual void columns(const void* const* rows, int count, std::int64_t width, std::int64_t first, const void* shifts,
                       void* acc) const = 0;
  /// Writes results number out, out + stride, … to `to`, with a distance of `to_stride` elements.
  virtual void finish(const void* acc, std::int64_t width, std::int64_t out, std::int64_t stride, void* to,
                      std::int64_t to_stride) const = 0;

 protected:
  ~ReduceSteps() = default;
};

/// Reduces x to y by the steps.
void run_reduction(const ReduceSteps& steps, const Tensor& x, const Tensor& y);

/// The number of independent accumulators of a leaf, which are combined at its end. Short leaves have one.
template <class Op>
inline constexpr int kReduceLanes = 256 / sizeof(typename Op::Acc);

/// Reduces one leaf: n elements, `stride` apart; the first is element number `first` of the result's elements. kUnit:
/// the stride is known to be 1, so that the loop vectorizes. Not inlined, to save compile time.
template <bool kUnit, class T, class Op>
[[gnu::noinline]] typename Op::Acc reduce_leaf(const Op& op, const T* x, std::int64_t stride, std::int64_t n,
                                               ShiftOf<Op> shift, std::int64_t first) {
  using Acc = typename Op::Acc;
  using Value = typename Op::Value;
  const auto at = [&](std::int64_t i) {
    return op.map(static_cast<Value>(x[kUnit ? i : i * stride]), shift, first + i);
  };
  constexpr int kLanes = kReduceLanes<Op>;
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

/// The steps of Op on values of type T. `shifts` is indexed by result number.
template <class T, class Op, class Shifts>
class TypedSteps final : public ReduceSteps {
  using Acc = typename Op::Acc;
  using Value = typename Op::Value;
  using Shift = ShiftOf<Op>;
  using Out = typename Op::Out;
  static_assert(sizeof(Acc) <= kAccBytes && sizeof(Shift) <= kShiftBytes && sizeof(Out) <= kOutBytes);

 public:
  TypedSteps(const Op& op, const Shifts& shifts)
      : ReduceSteps(dtype_of<T>, dtype_of<Out>, sizeof(Acc)), op_(op), shifts_(shifts) {}

  void identity(void* acc, std::int64_t width) const override {
    std::fill_n(static_cast<Acc*>(acc), width, Op::identity());
  }
  void combine(void* left, const void* right, std::int64_t width) const override {
    const Op op = op_;
    Acc* const l = static_cast<Acc*>(left);
    const Acc* const r = static_cast<const Acc*>(right);
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < width; ++i) {
      l[i] = op.combine(l[i], r[i]);
    }
  }
  void fold(void* acc, std::int64_t count) const override {
    const Op op = op_;
    Acc* const leaves = static_cast<Acc*>(acc);
    for (std::int64_t n = count / 2; n > 0; n /= 2) {
      for (std::int64_t i = 0; i < n; ++i) {
        leaves[i] = op.combine(leaves[2 * i], leaves[2 * i + 1]);
      }
    }
  }
  void rows(const void* values, const Patch& patch, std::int64_t out, std::int64_t out_step, std::int64_t first,
            std::int64_t first_step, void* acc) const override {
    const Op op = op_;
    const T* x = static_cast<const T*>(values);
    Acc* const results = static_cast<Acc*>(acc);
    for (std::int64_t row = 0; row < patch.rows; ++row) {
      if (patch.n >= kReduceLanes<Op>) {
        results[row] = patch.stride == 1 ? reduce_leaf<true>(op, x, 1, patch.n, shift(out), first)
                                         : reduce_leaf<false>(op, x, patch.stride, patch.n, shift(out), first);
      } else {
        const Shift row_shift = shift(out);
        Acc result = Op::identity();
        for (std::int64_t i = 0; i < patch.n; ++i) {
          result = op.combine(result, op.map(static_cast<Value>(x[i * patch.stride]), row_shift, first + i));
        }
        results[row] = result;
      }
      x += patch.row_stride;
      out += out_step;
      first += first_step;
    }
  }
  void load_shifts(std::int64_t out, std::int64_t stride, std::int64_t width, void* shifts) const override {
    if constexpr (Op::kShifted) {
      for (std::int64_t i = 0; i < width; ++i) {
        static_cast<Shift*>(shifts)[i] = shift(out + i * stride);
      }
    }
  }
  void columns(const void* const* rows, int count, std::int64_t width, std::int64_t first, const void* shifts,
               void* acc) const override {
    const Op op = op_;
    const Shift* const shift = static_cast<const Shift*>(shifts);
    Acc* const tile = static_cast<Acc*>(acc);
    const auto value = [&](const T* x, std::int64_t i, std::int64_t position) {
      if constexpr (Op::kShifted) {
        return op.map(static_cast<Value>(x[i]), shift[i], position);
      } else {
        return op.map(static_cast<Value>(x[i]), Shift{}, position);
      }
    };
    const T* const a = static_cast<const T*>(rows[0]);
    if (count == 1) {
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < width; ++i) {
        tile[i] = op.combine(tile[i], value(a, i, first));
      }
      return;
    }
    const T* const b = static_cast<const T*>(rows[1]);
    const T* const c = static_cast<const T*>(rows[2]);
    const T* const d = static_cast<const T*>(rows[3]);
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < width; ++i) {
      tile[i] = op.combine(tile[i], op.combine(op.combine(value(a, i, first), value(b, i, first + 1)),
                                               op.combine(value(c, i, first + 2), value(d, i, first + 3))));
    }
  }
  void finish(const void* acc, std::int64_t width, std::int64_t out, std::int64_t stride, void* to,
              std::int64_t to_stride) const override {
    for (std::int64_t i = 0; i < width; ++i, out += stride) {
      static_cast<Out*>(to)[i * to_stride] = static_cast<Out>(op_.finish(static_cast<const Acc*>(acc)[i], shift(out)));
    }
  }

 private:
  Shift shift([[maybe_unused]] std::int64_t out) const {
    if constexpr (Op::kShifted) {
      return static_cast<Shift>(shifts_[out]);
    } else {
      return Shift{};
    }
  }

  const Op op_;
  const Shifts shifts_;
};

}  // namespace detail

/// Reduces x by `op` over the axes that have length 1 in y, and writes the results to y. If the op has shifts,
/// shifts[i] is that of element i of y in row-major order. T is the type as which the op reads elements: float for
/// 16-bit floats. If Op::Out is float, y may have 16-bit floats.
template <class T, class Op, class Shifts = const typename Op::Value*>
void reduce(Cpu, const Op& op, const Tensor& x, const Tensor& y, const Shifts& shifts = {}) {
  if (y.numel() != 0) {
    detail::run_reduction(detail::TypedSteps<T, Op, Shifts>(op, shifts), x, y);
  }
}

}  // namespace mica::kernels
