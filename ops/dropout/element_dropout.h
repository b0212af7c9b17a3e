#pragma once

// The choice of dropped elements: a function of the key and of an element's index in row-major order alone, so that all
// kernels and both devices drop the same ones. Eight neighbors share the 128 bits of one Philox block: on a GPU,
// computing 32 bits per element would take longer than loading and storing it.

#include <cmath>
#include <cstdint>

#include <mica/core/philox_rounds.h>

namespace mica {

/// `threshold` of 65536 elements are dropped, and the others are scaled accordingly.
struct ElementDropout {
  PhiloxKey key{};
  std::uint32_t threshold = 0;

  /// For a probability in [0, 1): rounded to a multiple of 1/65536, but to 0 only if it is 0.
  static std::uint32_t threshold_of(double p) {
    const auto nearest = static_cast<std::uint32_t>(std::lround(p * 65536));
    return p == 0 ? 0 : nearest == 0 ? 1 : nearest > 65535 ? 65535 : nearest;
  }
  bool drops() const { return threshold > 0; }
  double scale() const { return 1 / (1 - threshold / 65536.0); }
};

namespace detail {

constexpr int kDropoutGroup = 8;  // elements that share a Philox block

/// The random bits of elements 8 · group, …, 8 · group + 7. The key is absolute.
MICA_HOST_DEVICE inline PhiloxBlock draw_dropout_group(PhiloxKey key, std::uint64_t group) {
  return philox_rounds<7>(key, group);
}

/// Whether element i of the group is kept: its 16 bits, as a number, are at least the threshold.
MICA_HOST_DEVICE inline bool is_kept(const PhiloxBlock& bits, int i, std::uint32_t threshold) {
  const std::uint32_t word = bits.word[i / 2];
  return (i % 2 == 0 ? word << 16 : word) >= threshold << 16;  // the bits below the 16 do not affect the comparison
}

}  // namespace detail

}  // namespace mica
