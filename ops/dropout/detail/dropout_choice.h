#pragma once

#include <cmath>
#include <cstdint>

#include <mica/core/detail/philox_rounds.h>

namespace mica {

/// Dropout with the probability threshold / kLevels. Elements that are kept are scaled by kLevels / (kLevels −
/// threshold).
template <std::uint32_t kLevels>
struct DropoutChoice {
  PhiloxKey key{};
  std::uint32_t threshold = 0;

  /// The threshold for a probability p in [0, 1), rounded to a multiple of 1/kLevels, but to 0 only if p is 0.
  static std::uint32_t threshold_of(double p) {
    const auto nearest = static_cast<std::uint32_t>(std::lround(p * kLevels));
    return p == 0 ? 0 : nearest == 0 ? 1 : nearest > kLevels - 1 ? kLevels - 1 : nearest;
  }
  bool drops() const { return threshold > 0; }
  double kept_share() const { return 1 - threshold / double{kLevels}; }
  double scale() const { return 1 / kept_share(); }
};

}  // namespace mica
