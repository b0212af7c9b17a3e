#pragma once

#include <mica/core/tensor.h>

namespace mica::optim {

/// Scales the gradients of `parameters` in place so that their norm as one vector, (Σ g²)^½, is at most `max_norm`:
/// by max_norm / (norm + 1e-6), as PyTorch does. Parameters without a gradient are ignored, and duplicates count once.
/// A gradient shared by two parameters counts for each of them and is scaled once.
///
/// Returns the norm before clipping, a float64 scalar on the device of the first gradient. Its item() waits for the
/// device; this function does not, unless the gradients are on several devices. Sums are in float64, in an order that
/// depends on the shapes alone. With `error_if_nonfinite`, the function waits, and a norm that is not finite is an
/// error that leaves the gradients unchanged; otherwise such a norm makes them NaN.
///
/// An optimizer can clip within its step, without an extra pass over the gradients: see StepOptions::max_grad_norm.
/// With a GradScaler this is the only way, since gradients are scaled until the step: a step with a scaler refuses
/// gradients that this function has clipped.
Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, bool error_if_nonfinite = false);

}  // namespace mica::optim
