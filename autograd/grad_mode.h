#pragma once

#include <utility>

#include <mica/autograd/detail/thread_state.h>
#include <mica/core/detail/nesting.h>

namespace mica::autograd {

// Modes are per thread: a new thread starts with recording on, whatever the mode of the thread that started it. Guards
// must end in the reverse order of their construction, on the thread that constructed them; otherwise the program ends
// with an error that says so.

/// True if ops on this thread are recorded.
inline bool grad_enabled() { return thread_state.grad_enabled; }

/// True if this thread is in inference mode.
bool inference_mode_enabled();

/// Turns recording on or off for this thread until the end of scope. In inference mode it stays off.
class GradMode {
 public:
  explicit GradMode(bool enabled) : previous_(grad_enabled()) {
    thread_state.grad_enabled = enabled && !inference_mode_enabled();
  }
  ~GradMode() { thread_state.grad_enabled = previous_; }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  mica::detail::Nested<GradMode> nested_{"autograd::NoGrad or EnableGrad"};
  bool previous_;
};

/// Turns recording off until the end of scope: `autograd::NoGrad guard;`.
class NoGrad : public GradMode {
 public:
  NoGrad() : GradMode(false) {}
};

/// Turns recording back on inside NoGrad until the end of scope: `autograd::EnableGrad guard;`.
class EnableGrad : public GradMode {
 public:
  EnableGrad() : GradMode(true) {}
};

/// Turns recording off until the end of scope, for the inside of an op or of a backward pass (as opposed to a request
/// by the user's program). With `on` false: marks user code that an op calls back, and turns recording on.
class InsideOp : public GradMode {
 public:
  explicit InsideOp(bool on = true) : GradMode(!on), previous_(thread_state.inside_op) { thread_state.inside_op = on; }
  ~InsideOp() { thread_state.inside_op = previous_; }

 private:
  bool previous_;
};

/// True if recording is off because the user's program asked for it.
inline bool grad_disabled_by_user() { return !thread_state.grad_enabled && !thread_state.inside_op; }

/// Turns recording off until the end of scope; tensors created meanwhile do not count in-place writes. For programs
/// that only evaluate. With `enabled` false: ordinary recording, also inside inference mode.
///
/// Tensors created in this mode (`x.is_inference()`), and their views, can be read anywhere. Outside of it, writing
/// them in place, requiring a gradient of them or saving them for backward is an error, since a modification could not
/// be detected; clone(x) makes an ordinary tensor. Tensors created before can be written inside the mode, and the write
/// is counted.
class InferenceMode {
 public:
  explicit InferenceMode(bool enabled = true);
  ~InferenceMode();
  InferenceMode(const InferenceMode&) = delete;
  InferenceMode& operator=(const InferenceMode&) = delete;

 private:
  mica::detail::Nested<GradMode> nested_{"autograd::InferenceMode"};
  bool previous_inference_;
  bool previous_grad_;
};

}  // namespace mica::autograd

namespace mica {

/// Calls f with recording off: `no_grad([&] { … })`.
template <class F>
decltype(auto) no_grad(F&& f) {
  const autograd::NoGrad guard;
  return std::forward<F>(f)();
}

/// Calls f with recording on, also inside no_grad: `enable_grad([&] { … })`.
template <class F>
decltype(auto) enable_grad(F&& f) {
  const autograd::EnableGrad guard;
  return std::forward<F>(f)();
}

/// Calls f in inference mode (see InferenceMode): `inference_mode([&] { return model(x); })`.
template <class F>
decltype(auto) inference_mode(F&& f) {
  const autograd::InferenceMode guard;
  return std::forward<F>(f)();
}

}  // namespace mica
