#pragma once

#include <cstdint>

namespace mica {

/// n / d, rounded up, for n ≥ 0 and d > 0.
constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t d) { return (n + d - 1) / d; }

}  // namespace mica
