#pragma once

#include <cmath>
#include <limits>

#include <mica/core/dtype.h>

namespace mica::distributed::detail {

/// The smaller or the greater of two elements; NaN if one of them is NaN. The bits do not depend on the order of a and
/// b, which differs between ranks: all NaNs become the same one, and −0 is less than 0.
template <bool kLeast, class T>
T extremum(T a, T b) {
  using A = Accumulate<T>;
  const A x = static_cast<A>(a), y = static_cast<A>(b);
  if constexpr (std::numeric_limits<A>::has_quiet_NaN) {
    if (std::isnan(x) || std::isnan(y)) {
      return static_cast<T>(std::numeric_limits<A>::quiet_NaN());
    }
    if (x == y) {
      return std::signbit(x) == kLeast ? a : b;
    }
  }
  return (x < y) == kLeast ? a : b;
}

}  // namespace mica::distributed::detail
