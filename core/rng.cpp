#include <mutex>

#include <mica/core/rng.h>

namespace mica {

namespace {

std::mutex mutex;
PhiloxKey generator;

}  // namespace

void manual_seed(std::uint64_t seed) { set_rng_state({.seed = seed, .offset = 0}); }

PhiloxKey next_philox_key() {
  const std::lock_guard lock(mutex);
  const PhiloxKey key = generator;
  generator.offset += 4;  // one Philox block of every subsequence
  return key;
}

PhiloxKey rng_state() {
  const std::lock_guard lock(mutex);
  return generator;
}

void set_rng_state(PhiloxKey state) {
  const std::lock_guard lock(mutex);
  generator = state;
}

}  // namespace mica
