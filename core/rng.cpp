#include <mutex>

#include <mica/core/check.h>
#include <mica/core/rng.h>

namespace mica {

namespace {

std::mutex mutex;
PhiloxKey generator;

// The innermost of this thread.
thread_local RecordPhiloxKeys* record = nullptr;
thread_local ReplayPhiloxKeys* replay = nullptr;

PhiloxKey draw() {
  const std::lock_guard lock(mutex);
  const PhiloxKey key = generator;
  generator.offset += 4;  // one Philox block of every subsequence
  return key;
}

}  // namespace

void manual_seed(std::uint64_t seed) { set_rng_state({.seed = seed, .offset = 0}); }

PhiloxKey next_philox_key() {
  PhiloxKey key;
  if (replay == nullptr) {
    key = draw();
  } else {
    check(replay->left() > 0, "random: asked for more random tensors than the first time, when there were {}",
          replay->keys_.size());
    key = replay->keys_[replay->drawn_++];
  }
  for (RecordPhiloxKeys* at = record; at != nullptr; at = at->outer_) {
    at->keys_.push_back(key);
  }
  return key;
}

PhiloxKey rng_state() {
  const std::lock_guard lock(mutex);
  return generator;
}

void set_rng_state(PhiloxKey state) {
  if (replay != nullptr) {
    return;  // what was drawn after this the first time is among the keys
  }
  const std::lock_guard lock(mutex);
  generator = state;
}

RecordPhiloxKeys::RecordPhiloxKeys(std::vector<PhiloxKey>& keys) : keys_(keys), outer_(record) { record = this; }

RecordPhiloxKeys::~RecordPhiloxKeys() { record = outer_; }

ReplayPhiloxKeys::ReplayPhiloxKeys(const std::vector<PhiloxKey>& keys)
    : keys_(keys), outer_replay_(replay), outer_record_(record) {
  replay = this;
  record = nullptr;  // what is drawn again is nothing new
}

ReplayPhiloxKeys::~ReplayPhiloxKeys() {
  replay = outer_replay_;
  record = outer_record_;
}

}  // namespace mica
