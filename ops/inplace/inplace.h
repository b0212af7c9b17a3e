#pragma once

#include <mica/core/tensor.h>

namespace mica {

// In-place ops write into an existing tensor, the target, and return it. The target must not have overlapping elements,
// as an expanded tensor has; otherwise they throw.
//
// Autograd records an in-place op if the target or the source requires a gradient. The target's history is then that of
// its new value, and gradients flow to its old value and to the source. If the target is a view, the histories of its
// base and of the base's other views change, too. Views created in no_grad or by detach() are independent tensors for
// autograd. While recording, writing to a leaf that requires a gradient, or to a view of one, throws; use no_grad to
// modify it. Each write increments the target's version, so that a backward that saved the old elements throws instead
// of using the new ones.

/// Sets every element of x to `value`, converted to x's dtype. For an integer dtype, the value must be representable.
const Tensor& fill_(const Tensor& x, double value);
/// Sets every element of x to 0.
const Tensor& zero_(const Tensor& x);

/// x = source. The source broadcasts to x's shape and may have another dtype and device.
const Tensor& copy_(const Tensor& x, const Tensor& source);

/// x += alpha · y. y broadcasts to x's shape and has x's dtype (any except bool) and device. Integers wrap around; for
/// them, `alpha` must be an integer.
const Tensor& add_(const Tensor& x, const Tensor& y, double alpha = 1);

/// x *= y, for y as in add_, or a number. Integers wrap around.
const Tensor& mul_(const Tensor& x, const Tensor& y);
const Tensor& mul_(const Tensor& x, double y);

}  // namespace mica
