#pragma once

#include <cstdint>

#include <mica/core/detail/philox_rounds.h>

namespace mica::io {

/// Random numbers for one sample in one epoch. They are a function of (seed, epoch, index) and of how many were drawn
/// before, so that data sets read the same samples on any number of workers and ranks, and after a run was resumed.
/// Data sets use it instead of the global generator, which DataLoader refuses.
class SampleRandom {
 public:
  SampleRandom(std::uint64_t seed, std::int64_t epoch, std::int64_t index);

  double uniform();  ///< in [0, 1)
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  std::int64_t below(std::int64_t n);  ///< in [0, n). Throws unless n ≥ 1.
  bool chance(double probability) { return uniform() < probability; }
  double normal();  ///< of mean 0 and variance 1
  /// Of the distribution Beta(a, a). Throws unless a > 0.
  double beta(double a);

 private:
  std::uint64_t bits();
  double gamma(double shape);

  PhiloxKey key_;
  std::uint64_t index_;
  PhiloxBlock block_{};
  int left_ = 0;  // unused pairs of words in block_
};

}  // namespace mica::io
