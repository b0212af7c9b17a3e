#include <utility>

#include <mica/core/capture.h>
#include <mica/core/check.h>
#include <mica/core/detail/callable.h>

namespace mica {

namespace {

thread_local constinit detail::Capture* current = nullptr;

}  // namespace

bool is_capturing() { return current != nullptr; }

void on_each_replay(std::function<void()> f) {
  check_callable(f, "on_each_replay");
  if (current != nullptr) {
    current->calls.push_back(std::move(f));
  } else {
    f();
  }
}

void check_not_capturing(const char* op) {
  check(!is_capturing(), "{}: cannot be captured into a CUDA graph; call it outside of cuda::capture", op);
}

namespace detail {

Capture* current_capture() { return current; }

void after_each_replay(std::function<void()> f) {
  check(is_capturing(), "after_each_replay: expected a capture");
  current->after.push_back(std::move(f));
}

Capturing::Capturing(Capture& capture) : outer_(std::exchange(current, &capture)) {}

Capturing::~Capturing() { current = outer_; }

}  // namespace detail

}  // namespace mica
