#pragma once

// Maps elements of any dtype to unsigned integers with the same order. So both devices sort alike, and CUB's radix sort
// is compiled only once.

#include <bit>
#include <cstdint>
#include <type_traits>

#include <mica/core/dtype.h>

namespace mica::kernels {

/// How many bits, from the lowest on, sort_key() uses for elements of type T.
template <class T>
inline constexpr int kSortKeyBits = 8 * static_cast<int>(sizeof(T));

namespace detail {

template <std::size_t kBytes>
using UnsignedOf = std::conditional_t<
    kBytes == 8, std::uint64_t,
    std::conditional_t<kBytes == 4, std::uint32_t, std::conditional_t<kBytes == 2, std::uint16_t, std::uint8_t>>>;

}  // namespace detail

/// sort_key(a) < sort_key(b) if a comes before b. The bits of floats, as integers, are in the order of their magnitude;
/// for negative floats, the order is reversed.
template <class T>
MICA_HOST_DEVICE std::uint64_t sort_key(T value, bool descending) {
  using Bits = detail::UnsignedOf<sizeof(T)>;
  constexpr Bits kTop = static_cast<Bits>(Bits{1} << (kSortKeyBits<T> - 1));
  constexpr Bits kAll = static_cast<Bits>(~Bits{0});
  Bits key;
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::uint8_t>) {
    key = static_cast<Bits>(value);
  } else if constexpr (std::is_integral_v<T>) {
    key = static_cast<Bits>(static_cast<Bits>(value) ^ kTop);
  } else {
    const auto number = static_cast<Accumulate<T>>(value);
    const Bits bits = number == 0 ? Bits{0} : std::bit_cast<Bits>(value);
    key = number != number ? kAll : (bits & kTop) != 0 ? static_cast<Bits>(~bits) : static_cast<Bits>(bits | kTop);
  }
  return descending ? static_cast<Bits>(~key) : key;
}

}  // namespace mica::kernels
