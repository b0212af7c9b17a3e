#pragma once

// Sums and products of elements. Integers wrap around in two's complement, which C++ guarantees for unsigned types
// only; floats use the operators.

#include <type_traits>

#include <mica/core/half.h>

namespace mica {

namespace detail {
// At least as wide as int, so that no operand is promoted to a signed type.
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
