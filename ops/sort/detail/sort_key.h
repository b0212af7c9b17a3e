#pragma once

// The order of all dtypes as one of unsigned integers, so that both devices sort alike and CUB's radix sort is compiled
// once.

#include <bit>
#include <cstdint>
#include <type_traits>

#include <mica/core/dtype.h>

namespace mica::kernels {

/// The bits of T that sort_key() uses, from the lowest.
template <class T>
inline constexpr int kSortKeyBits = 8 * static_cast<int>(sizeof(T));

namespace detail {

template <std::size_t kBytes>
using UnsignedOf = std::conditional_t<
    kBytes == 8, std::uint64_t,
    std::conditional_t<kBytes == 4, std::uint32_t, std::conditional_t<kBytes == 2, std::uint16_t, std::uint8_t>>>;

}  // namespace detail

/// sort_key(a) < sort_key(b) if a comes before b. A float's bits order its magnitude; its sign inverts that order.
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
