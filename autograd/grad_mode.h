#pragma once

#include <utility>

#include <mica/autograd/thread_state.h>

namespace mica::autograd {

// The modes are the calling thread's own: a new thread starts with recording on, whatever the one that started it does.

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
  bool previous_;
};

/// Nothing is recorded until the end of scope: `autograd::NoGrad guard;`.
class NoGrad : public GradMode {
 public:
  NoGrad() : GradMode(false) {}
};

/// Ops are recorded again until the end of scope, inside NoGrad: `autograd::EnableGrad guard;`.
class EnableGrad : public GradMode {
 public:
  EnableGrad() : GradMode(true) {}
};

/// Nothing is recorded until the end of scope because it is part of an op or of a backward pass; not because the
/// program asked for it. With `on` false: what runs now is the program's own again.
class InsideOp : public GradMode {
 public:
  explicit InsideOp(bool on = true) : GradMode(!on), previous_(thread_state.inside_op) { thread_state.inside_op = on; }
  ~InsideOp() { thread_state.inside_op = previous_; }

 private:
  bool previous_;
};

/// True if recording is off and the program asked for that.
inline bool grad_disabled_by_user() { return !thread_state.grad_enabled && !thread_state.inside_op; }

/// Nothing is recorded until the end of scope, and tensors made meanwhile never count their writes in place: for
/// programs that only evaluate. With `enabled` false: ordinary recording, also inside inference mode.
///
/// Tensors made in the mode (`x.is_inference()`; their views too) can be read anywhere. Outside of it they cannot be
/// written in place, ask for a gradient or be saved for backward, as nobody could find out that they changed: each is
/// an error, and the way out is clone(x). Tensors made before can be written inside the mode, and count it.
class InferenceMode {
 public:
  explicit InferenceMode(bool enabled = true);
  ~InferenceMode();
  InferenceMode(const InferenceMode&) = delete;
  InferenceMode& operator=(const InferenceMode&) = delete;

 private:
  bool previous_inference_;
  bool previous_grad_;
};

}  // namespace mica::autograd

namespace mica {

/// Calls f and records nothing of what it does: `no_grad([&] { … })`.
template <class F>
decltype(auto) no_grad(F&& f) {
  const autograd::NoGrad guard;
  return std::forward<F>(f)();
}

/// Calls f and records what it does, also inside no_grad: `enable_grad([&] { … })`.
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
