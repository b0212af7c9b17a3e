#include <algorithm>
#include <bit>

#include <mica/core/check.h>
#include <mica/io/permutation.h>

namespace mica::io {

namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 / the golden ratio

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::uint64_t low_mask(int bits) { return (std::uint64_t{1} << bits) - 1; }

}  // namespace

std::uint64_t mix_seeds(std::uint64_t a, std::uint64_t b) { return mix(mix(a + kGolden) + (b + 1) * kGolden); }

Permutation::Permutation(std::int64_t size, std::uint64_t seed) : size_(static_cast<std::uint64_t>(size)), keys_{} {
  check(size >= 1, "Permutation: expected a size of at least 1, got {}", size);
  const int bits = std::max(2, static_cast<int>(std::bit_width(size_ - 1)));
  low_bits_ = bits / 2;
  high_bits_ = bits - low_bits_;
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    keys_[i] = mix_seeds(seed, i);
  }
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  check(index >= 0 && index < size(), "Permutation: expected an index in [0, {}), got {}", size(), index);
  auto at = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t low = at & low_mask(low_bits_);
    std::uint64_t high = at >> low_bits_;
    for (std::size_t i = 0; i < keys_.size(); i += 2) {
      high ^= mix(low + keys_[i]) & low_mask(high_bits_);
      low ^= mix(high + keys_[i + 1]) & low_mask(low_bits_);
    }
    at = high << low_bits_ | low;
  } while (at >= size_);
  return static_cast<std::int64_t>(at);
}

}  // namespace mica::io
