#pragma once

#include <cstdint>

namespace mica {

/// Where one random tensor starts in the stream of random numbers: element i of it is a function of
/// (seed, offset, i) alone, the same on every device.
struct PhiloxKey {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  // in 32-bit outputs of one subsequence, as cuRAND counts; a multiple of 4
};

/// Restarts the program's generator.
void manual_seed(std::uint64_t seed);

/// The key for the next random tensor; moves the generator on.
PhiloxKey next_philox_key();

/// The generator as it stands, to store in a checkpoint, and the way back.
PhiloxKey rng_state();
void set_rng_state(PhiloxKey state);

}  // namespace mica
