#pragma once

#include <mica/core/tensor.h>

namespace mica::optim {

/// Scales the gradients of `parameters` in place so that their norm as one vector, (Σ g²)^½, is at most `max_norm`:
/// by max_norm / (norm + 1e-6), as PyTorch does. Returns the norm before; parameters without gradient do not count.
///
/// Sums are in float64 and in an order that depends on the shapes alone. Waits for the device. With
/// `error_if_nonfinite` a norm that is not finite is an error and the gradients stay as they are; else it spreads NaN.
double clip_grad_norm_(const Tensors& parameters, double max_norm, bool error_if_nonfinite = false);

}  // namespace mica::optim
