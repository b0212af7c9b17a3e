#pragma once

#include <utility>

namespace mica::autograd {

/// True if ops on this thread are recorded.
bool grad_enabled();

/// Turns recording on or off for this thread until the end of scope.
class GradMode {
 public:
  explicit GradMode(bool enabled);
  ~GradMode();
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

/// Nothing is recorded until the end of scope because it is part of an op or of a backward pass; not because the
/// program asked for it. With `on` false: what runs now is the program's own again.
class InsideOp : public GradMode {
 public:
  explicit InsideOp(bool on = true);
  ~InsideOp();

 private:
  bool previous_;
};

/// True if recording is off and the program asked for that.
bool grad_disabled_by_user();

}  // namespace mica::autograd

namespace mica {

/// Calls f and records nothing of what it does: `no_grad([&] { … })`.
template <class F>
decltype(auto) no_grad(F&& f) {
  const autograd::NoGrad guard;
  return std::forward<F>(f)();
}

}  // namespace mica
