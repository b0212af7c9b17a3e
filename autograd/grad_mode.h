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

/// Ops are recorded again until the end of scope, inside NoGrad: `autograd::EnableGrad guard;`.
class EnableGrad : public GradMode {
 public:
  EnableGrad() : GradMode(true) {}
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

}  // namespace mica
