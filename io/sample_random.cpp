#include <cmath>

#include <mica/core/check.h>
#include <mica/core/philox.h>
#include <mica/io/permutation.h>
#include <mica/io/sample_random.h>

namespace mica::io {

SampleRandom::SampleRandom(std::uint64_t seed, std::int64_t epoch, std::int64_t index)
    : key_{.seed = mix_seeds(seed, static_cast<std::uint64_t>(epoch))}, index_(static_cast<std::uint64_t>(index)) {}

std::uint64_t SampleRandom::bits() {
  if (left_ == 0) {
    block_ = philox_block(key_, index_);
    key_.offset += 4;
    left_ = 2;
  }
  --left_;
  return block_.word[2 * left_] | static_cast<std::uint64_t>(block_.word[2 * left_ + 1]) << 32;
}

double SampleRandom::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

std::int64_t SampleRandom::below(std::int64_t n) {
  check(n >= 1, "SampleRandom::below: expected a bound of at least 1, got {}", n);
  return static_cast<std::int64_t>(bounded(bits(), static_cast<std::uint64_t>(n)));
}

double SampleRandom::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.2831853071795865 * uniform());
}

// Marsaglia and Tsang, "A simple method for generating gamma variables" (2000); shapes below 1 by their remark in
// section 6, as a logarithm, since the variable itself may underflow.
double SampleRandom::gamma(double shape) {
  const double boost = shape < 1 ? std::log(1 - uniform()) / shape : 0;
  const double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = normal(), v = std::pow(1 + c * x, 3);
    if (v > 0 && std::log(1 - uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) {
      return std::log(d * v) + boost;
    }
  }
}

double SampleRandom::beta(double a) {
  check(a > 0 && std::isfinite(a), "SampleRandom::beta: expected a positive parameter, got {}", a);
  const double x = gamma(a), y = gamma(a);
  return 1 / (1 + std::exp(y - x));
}

}  // namespace mica::io
