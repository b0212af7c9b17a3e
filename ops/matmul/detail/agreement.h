#pragma once

#include <cmath>
#include <cstddef>
#include <span>

namespace mica::detail {

/// Whether two results of the same size are equal up to rounding: NaN and infinities are at the same positions, and
/// finite elements differ by at most `tolerance` times the norm of `expected`.
inline bool agree_up_to_rounding(std::span<const float> expected, std::span<const float> got, double tolerance) {
  double apart = 0;
  double size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = expected[i];
    const double g = got[i];
    if (!std::isfinite(e) || !std::isfinite(g)) {
      if (e != g && !(std::isnan(e) && std::isnan(g))) {
        return false;
      }
      continue;
    }
    apart += (g - e) * (g - e);
    size += e * e;
  }
  return apart <= tolerance * tolerance * size;
}

}  // namespace mica::detail
