#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mica {

/// Position of a random tensor in the random stream. Element i is a function of (seed, offset, i) alone, the same on
/// every device.
///
/// A key drawn while a CUDA graph is captured is relative: `start` points to seed and offset of the generator at the
/// beginning of the replay, in the graph's device memory, and offset counts from there. philox_block() adds the two;
/// kernels that read seed and offset themselves use absolute_key().
struct PhiloxKey {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  // in 32-bit outputs of one subsequence, as cuRAND counts; a multiple of 4
  const std::uint64_t* start = nullptr;
};

/// Seeds the global generator.
void manual_seed(std::uint64_t seed);

/// The key for the next random tensor; advances the generator. While this thread captures a CUDA graph, each replay
/// advances the generator instead, by as much as the captured calls would: replays draw the same numbers as the same
/// steps without a graph.
PhiloxKey next_philox_key();

/// Throws if the key was drawn while a CUDA graph was captured: for ops on the CPU, which replays do not run.
void check_host_key(const PhiloxKey& key);

/// Get and set the generator's state, for checkpoints. Errors while a CUDA graph is captured.
PhiloxKey rng_state();
void set_rng_state(PhiloxKey state);

/// Appends every key that this thread draws until the end of scope to `keys`. Does not affect the generator.
class RecordPhiloxKeys {
 public:
  explicit RecordPhiloxKeys(std::vector<PhiloxKey>& keys);
  ~RecordPhiloxKeys();
  RecordPhiloxKeys(const RecordPhiloxKeys&) = delete;
  RecordPhiloxKeys& operator=(const RecordPhiloxKeys&) = delete;

 private:
  friend PhiloxKey next_philox_key();

  std::vector<PhiloxKey>& keys_;
  RecordPhiloxKeys* outer_;
};

/// Until the end of scope, this thread draws `keys` in order instead of new ones, which reproduces the same random
/// tensors. The global generator does not change, so other threads are unaffected. Drawing more keys than there are
/// throws.
class ReplayPhiloxKeys {
 public:
  explicit ReplayPhiloxKeys(const std::vector<PhiloxKey>& keys);
  explicit ReplayPhiloxKeys(const std::vector<PhiloxKey>&& keys) = delete;
  ~ReplayPhiloxKeys();
  ReplayPhiloxKeys(const ReplayPhiloxKeys&) = delete;
  ReplayPhiloxKeys& operator=(const ReplayPhiloxKeys&) = delete;

  /// The number of keys not drawn yet.
  std::size_t left() const { return keys_.size() - drawn_; }

 private:
  friend PhiloxKey next_philox_key();

  const std::vector<PhiloxKey>& keys_;
  std::size_t drawn_ = 0;
  ReplayPhiloxKeys* outer_replay_;
  RecordPhiloxKeys* outer_record_;
};

}  // namespace mica
