#pragma once

// What is done to the elements of a reduction, written once for both devices. A reduction starts from identity(), takes
// in each element by map(), joins partial results by combine() and ends with finish(). Two-pass reductions carry a
// `shift` for each result, found by the first pass.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <mica/core/dtype.h>

namespace mica::kernels {

/// Σ x / divisor
template <class T>
struct SumOp {
  using Acc = std::conditional_t<std::is_integral_v<T>, std::int64_t, Accumulate<T>>;
  using Out = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
  static constexpr bool kShifted = false;

  Acc divisor;

  MICA_HOST_DEVICE static Acc identity() { return 0; }
  MICA_HOST_DEVICE Acc map(Acc x, Acc) const { return x; }
  MICA_HOST_DEVICE Acc combine(Acc a, Acc b) const { return a + b; }
  MICA_HOST_DEVICE Acc finish(Acc sum, Acc) const {
    if constexpr (std::is_integral_v<T>) {
      return sum;
    } else {
      return sum / divisor;
    }
  }
};

}  // namespace mica::kernels
