#pragma once

#include <array>
#include <cstdint>

namespace mica::io {

/// A pseudo-random permutation of 0 … size − 1 that is computed on demand and not stored: shuffling takes no memory,
/// and any element can be computed directly. A function of size and seed alone.
///
/// An alternating Feistel network over the smallest power of two that holds `size` (Luby and Rackoff, 1988; Black and
/// Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Results that are too large are permuted again ("cycle
/// walking"), less than once per call on average.
class Permutation {
 public:
  /// Throws unless size ≥ 1.
  Permutation(std::int64_t size, std::uint64_t seed);

  std::int64_t size() const { return static_cast<std::int64_t>(size_); }

  /// The image of `index`. Throws unless 0 ≤ index < size().
  std::int64_t operator()(std::int64_t index) const;

 private:
  static constexpr int kRounds = 10;

  std::uint64_t size_;
  int low_bits_, high_bits_;  // widths of the halves; they differ by at most 1
  std::array<std::uint64_t, kRounds> keys_;
};

/// A hash of the pair (a, b), by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
std::uint64_t mix_seeds(std::uint64_t a, std::uint64_t b);

}  // namespace mica::io
