#pragma once

// The element functions of reductions, for both devices. A reduction starts with identity(), maps element i of a row,
// converted to Value, with map(x, shift, i), merges partial results with combine() and ends with finish(). Reductions
// in two passes have a `shift` per result, of type Op::Shift or Value, which the first pass computes.

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <mica/core/detail/wrap.h>
#include <mica/core/dtype.h>
#include <mica/core/math.h>

namespace mica::kernels {

/// Σ x / divisor; integers and booleans sum to int64, wrapping around.
template <class T>
struct SumOp {
  using Value = std::conditional_t<std::is_integral_v<T>, std::int64_t, Accumulate<T>>;
  using Acc = Value;
  using Out = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
  static constexpr bool kShifted = false;

  Value divisor;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value x, Value, std::int64_t) const { return x; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return wrapping_add(a, b); }
  MICA_HOST_DEVICE Acc finish(Acc sum, Value) const {
    if constexpr (std::is_integral_v<T>) {
      return sum;
    } else {
      return sum / divisor;
    }
  }
};

/// The mean minus the shift, which is an element of the row, so that the sum stays small even if the mean is large.
template <class T>
struct MeanOffsetOp {
  using Value = Accumulate<T>;
  using Acc = Value;
  using Out = Value;
  static constexpr bool kShifted = true;

  Value count;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value x, Value shift, std::int64_t) const { return x - shift; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Value) const { return sum / count; }
};

/// A mean as the sum of two numbers, first + offset. As a single V it would be rounded, which matters if the mean is
/// large compared to the spread, such as 1e6 and 1.
template <class V>
struct Center {
  V first;
  V offset;

  MICA_HOST_DEVICE V distance(V x) const { return (x - first) - offset; }
};

/// The results of MeanOffsetOp, and the elements used as its shifts.
template <class T>
struct Centers {
  const T* first;
  const Accumulate<T>* offset;

  MICA_HOST_DEVICE Center<Accumulate<T>> operator[](std::int64_t i) const {
    using V = Accumulate<T>;
    constexpr V kInf = std::numeric_limits<V>::infinity();
    // If the differences overflow, distances from the mean are infinite, not NaN.
    const bool overflow = (offset[i] == kInf) | (offset[i] == -kInf);
    return {overflow ? V{0} : static_cast<V>(first[i]), offset[i]};
  }
};

/// Σ (x - mean)² / divisor; the shift is the mean.
template <class T>
struct VarOp {
  using Value = Accumulate<T>;
  using Shift = Center<Value>;
  using Acc = Value;
  using Out = T;
  static constexpr bool kShifted = true;

  Value divisor;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value x, Shift mean, std::int64_t) const { return mean.distance(x) * mean.distance(x); }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Shift) const { return sum / divisor; }
};

/// log Σ exp(x); the shift is the largest x. If that is infinite, nothing is subtracted, since exp gives 0 or infinity.
template <class T>
struct LogSumExpOp {
  using Value = Accumulate<T>;
  using Acc = Value;
  using Out = T;
  static constexpr bool kShifted = true;

  MICA_HOST_DEVICE static Value usable(Value largest) {
    constexpr Value kInf = std::numeric_limits<Value>::infinity();
    return ((largest == kInf) | (largest == -kInf)) ? 0 : largest;
  }
  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value x, Value largest, std::int64_t) const { return math::exp(x - usable(largest)); }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Value largest) const { return math::log(sum) + usable(largest); }
};

/// The largest or the smallest x; NaN if any x is NaN.
template <class T, bool kLargest, class Result = T>
struct ExtremeOp {
  using Value = Accumulate<T>;
  using Acc = Value;
  using Out = Result;
  static constexpr bool kShifted = false;

  MICA_HOST_DEVICE static Acc identity() {
    using Limits = std::numeric_limits<Value>;
    if constexpr (Limits::has_infinity) {
      return kLargest ? -Limits::infinity() : Limits::infinity();
    } else {
      return kLargest ? Limits::lowest() : Limits::max();
    }
  }
  MICA_HOST_DEVICE Acc map(Value x, Value, std::int64_t) const { return x; }
  // g++ vectorizes two selections, but not a single one with both conditions.
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const {
    const Acc extreme = (kLargest ? b > a : b < a) ? b : a;
    return b != b ? b : extreme;
  }
  MICA_HOST_DEVICE Acc finish(Acc extreme, Value) const { return extreme; }
};

/// Whether x is the extreme; if the extreme is NaN, whether x is NaN.
template <class V>
MICA_HOST_DEVICE bool is_extreme(V x, V extreme) {
  return (x == extreme) | ((x != x) & (extreme != extreme));
}

/// The first i at which x is the extreme; the shift is the extreme.
template <class T>
struct FindOp {
  using Value = Accumulate<T>;
  using Acc = std::int64_t;
  using Out = std::int64_t;
  static constexpr bool kShifted = true;

  MICA_HOST_DEVICE static Acc identity() { return std::numeric_limits<Acc>::max(); }
  MICA_HOST_DEVICE Acc map(Value x, Value extreme, std::int64_t i) const {
    return is_extreme(x, extreme) ? i : identity();
  }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a < b ? a : b; }
  MICA_HOST_DEVICE Acc finish(Acc first, Value) const { return first; }
};

/// How many x are the extreme; the shift is the extreme.
template <class T>
struct CountOp {
  using Value = Accumulate<T>;
  using Acc = std::int64_t;
  using Out = Accumulate<T>;
  static constexpr bool kShifted = true;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Value x, Value extreme, std::int64_t) const { return is_extreme(x, extreme) ? 1 : 0; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc count, Value) const { return count; }
};

// Element-wise gradients.

/// d var / dx = 2 (x - mean) / divisor
template <class V>
struct VarGradient {
  V scale;
  MICA_HOST_DEVICE V operator()(V x, V first, V offset, V dy) const {
    return dy * scale * Center<V>{first, offset}.distance(x);
  }
};

/// d logsumexp / dx = exp(x - y); 0 where y is -inf
template <class V>
struct LogSumExpGradient {
  MICA_HOST_DEVICE V operator()(V x, V y, V dy) const {
    return y == -std::numeric_limits<V>::infinity() ? V{0} : dy * math::exp(x - y);
  }
};

/// The gradient divided evenly among all elements equal to the extreme.
template <class V>
struct ExtremeGradient {
  MICA_HOST_DEVICE V operator()(V x, V extreme, V count, V dy) const {
    return is_extreme(x, extreme) ? dy / count : V{0};
  }
};

/// The whole gradient goes to the element at `index`.
template <class V>
struct ScatterGradient {
  MICA_HOST_DEVICE V operator()(std::int64_t position, std::int64_t index, V dy) const {
    return position == index ? dy : V{0};
  }
};

}  // namespace mica::kernels
