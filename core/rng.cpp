#include <memory>
#include <mutex>

#include <mica/core/capture.h>
#include <mica/core/check.h>
#include <mica/core/detail/nesting.h>
#include <mica/core/detail/random_kernels.h>
#include <mica/core/rng.h>

namespace mica::detail {

// State shared by the random tensors of a captured graph.
struct CapturedRandom {
  Tensor start;             // seed and offset at the beginning of a replay, which it writes there
  std::uint64_t drawn = 0;  // by one replay, in units of PhiloxKey::offset
};

}  // namespace mica::detail

namespace mica {

namespace {

std::mutex mutex;
PhiloxKey generator;

// The innermost guards of this thread.
thread_local RecordPhiloxKeys* record = nullptr;
thread_local ReplayPhiloxKeys* replay = nullptr;

constexpr std::uint64_t kPerKey = 4;  // one Philox block of every subsequence

// Advances the generator and returns its previous position.
PhiloxKey advance(std::uint64_t by) {
  const std::lock_guard lock(mutex);
  const PhiloxKey key = generator;
  generator.offset += by;
  return key;
}

PhiloxKey draw_captured(detail::Capture& capture) {
  if (capture.random == nullptr) {
    const auto random = std::make_shared<detail::CapturedRandom>();
    random->start = empty({2}, int64, capture.device);
    capture.random = random;
    on_each_replay([random] {
      const PhiloxKey key = advance(random->drawn);
      on_device(random->start.device(), [&]<class D>(D device) {
        if constexpr (std::is_same_v<D, Cuda>) {
          kernels::store_key(device, random->start, key);
        }
      });
    });
  }
  const PhiloxKey key{.seed = 0,
                      .offset = capture.random->drawn,
                      .start = reinterpret_cast<const std::uint64_t*>(capture.random->start.data<std::int64_t>())};
  capture.random->drawn += kPerKey;
  return key;
}

PhiloxKey draw() {
  detail::Capture* const capture = detail::current_capture();
  return capture != nullptr ? draw_captured(*capture) : advance(kPerKey);
}

}  // namespace

void manual_seed(std::uint64_t seed) { set_rng_state({.seed = seed, .offset = 0}); }

PhiloxKey next_philox_key() {
  PhiloxKey key;
  if (replay == nullptr) {
    key = draw();
  } else {
    check(replay->left() > 0, "random: the function drew more random tensors than the first time, which drew {}",
          replay->keys_.size());
    key = replay->keys_[replay->drawn_++];
  }
  for (RecordPhiloxKeys* at = record; at != nullptr; at = at->outer_) {
    at->keys_.push_back(key);
  }
  return key;
}

void check_host_key(const PhiloxKey& key) {
  check(
      key.start == nullptr,
      "random: a tensor on the cpu cannot be drawn while a CUDA graph is captured, since replays do not run CPU work");
}

PhiloxKey rng_state() {
  check_not_capturing("rng_state");
  const std::lock_guard lock(mutex);
  return generator;
}

void set_rng_state(PhiloxKey state) {
  if (replay != nullptr) {
    return;  // the recorded keys include those drawn after this call
  }
  check_not_capturing("set_rng_state");
  const std::lock_guard lock(mutex);
  generator = state;
}

RecordPhiloxKeys::RecordPhiloxKeys(std::vector<PhiloxKey>& keys) : keys_(keys), outer_(record) { record = this; }

RecordPhiloxKeys::~RecordPhiloxKeys() {
  if (record != this) {
    detail::ended_out_of_order("RecordPhiloxKeys");
  }
  record = outer_;
}

ReplayPhiloxKeys::ReplayPhiloxKeys(const std::vector<PhiloxKey>& keys)
    : keys_(keys), outer_replay_(replay), outer_record_(record) {
  replay = this;
  record = nullptr;  // replayed keys are not recorded again
}

ReplayPhiloxKeys::~ReplayPhiloxKeys() {
  if (replay != this || record != nullptr) {
    detail::ended_out_of_order("ReplayPhiloxKeys");
  }
  replay = outer_replay_;
  record = outer_record_;
}

}  // namespace mica
