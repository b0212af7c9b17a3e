#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <mica/core/detail/wrap.h>

namespace mica {

/// Element i of an arithmetic sequence, rounded once and thus equal on every device.
template <class T>
struct Sequence {
  T start, step;

  MICA_HOST_DEVICE T operator()(std::int64_t i) const {
    if constexpr (std::is_integral_v<T>) {
      return wrapping_add(start, wrapping_mul(static_cast<T>(i), step));
    } else {
      return std::fma(static_cast<T>(i), step, start);
    }
  }
};

}  // namespace mica
