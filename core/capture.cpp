#include <utility>

#include <mica/core/capture.h>
#include <mica/core/check.h>

namespace mica {

namespace {

thread_local constinit detail::ReplayCalls* replay_calls = nullptr;  // of the capture under way

}  // namespace

bool is_capturing() { return replay_calls != nullptr; }

void on_each_replay(std::function<void()> f) {
  if (replay_calls != nullptr) {
    replay_calls->push_back(std::move(f));
  } else {
    f();
  }
}

void check_not_capturing(const char* op) {
  check(!is_capturing(),
        "{}: waits for the device, which a captured CUDA graph cannot do; call it outside of cuda::capture", op);
}

namespace detail {

Capturing::Capturing(ReplayCalls& calls) : outer_(std::exchange(replay_calls, &calls)) {}

Capturing::~Capturing() { replay_calls = outer_; }

}  // namespace detail

}  // namespace mica
