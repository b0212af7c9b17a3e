#pragma once

#include <mica/core/tensor.h>

namespace mica::optim {

/// Scales the gradients of `parameters` in place so that their norm as one vector, (Σ g²)^½, is at most `max_norm`:
/// by max_norm / (norm + 1e-6), as PyTorch does. Parameters without gradient do not count, and one that is given
/// several times counts once. A gradient that two parameters share counts for each and is scaled once.
///
/// Returns the norm before, a float64 scalar on the device of the first gradient: item() of it waits for the device,
/// this function does not, unless the gradients are on several devices. Sums are in float64 and in an order that
/// depends on the shapes alone. With `error_if_nonfinite` it waits, a norm that is not finite is an error and the
/// gradients stay as they are; else it spreads NaN.
///
/// An optimizer clips while it steps, without a pass of its own over the gradients: see StepOptions::max_grad_norm.
Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, bool error_if_nonfinite = false);

}  // namespace mica::optim
