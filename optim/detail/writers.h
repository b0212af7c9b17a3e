#pragma once

#include <mica/core/tensor.h>

namespace mica::optim {

// Writers (Storage::last_writer()) by which a step recognizes what it must not continue from.
inline constexpr char kAverages[] = "Ema::swap";           // a parameter holds its average
inline constexpr char kClipped[] = "clip_grad_norm_";      // a gradient was clipped
inline constexpr char kOwnValues[] = "the end of a swap";  // a parameter holds its own value again

/// Throws if a step from `parameter` and its gradient would be lost or wrong. `scaled`: the step unscales gradients.
inline void check_can_step(const char* optimizer, const Tensor& parameter, bool scaled) {
  check(parameter.handle()->storage->last_writer() != kAverages,
        "{}: step was called while a parameter of shape {} holds the average of an Ema, so that the step would be lost "
        "when it is swapped back: call swap() first",
        optimizer, parameter.shape());
  const Tensor grad = scaled ? parameter.grad() : Tensor{};
  check(!grad.defined() || grad.handle()->storage->last_writer() != kClipped,
        "{}: the gradient of a parameter of shape {} was clipped by clip_grad_norm_ while it was still scaled: pass "
        "max_grad_norm to step instead, which clips after unscaling",
        optimizer, parameter.shape());
}

}  // namespace mica::optim
