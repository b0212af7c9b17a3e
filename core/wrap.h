#pragma once

// Sums and products of elements. Those of integers wrap around, two's complement, as C++ says of unsigned types only;
// those of floats are the operators.

#include <type_traits>

#include <mica/core/half.h>

namespace mica {

namespace detail {
// At least as wide as int, so that nothing is promoted to a signed type.
template <class T>
using Wrapping = std::make_unsigned_t<decltype(T{} + T{})>;
}  // namespace detail

template <class T>
MICA_HOST_DEVICE T wrapping_add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = detail::Wrapping<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <class T>
MICA_HOST_DEVICE T wrapping_sub(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = detail::Wrapping<T>;
    return static_cast<T>(static_cast<U>(a) - static_cast<U>(b));
  } else {
    return a - b;
  }
}

template <class T>
MICA_HOST_DEVICE T wrapping_mul(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = detail::Wrapping<T>;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  } else {
    return a * b;
  }
}

}  // namespace mica
