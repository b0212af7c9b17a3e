#pragma once

#include <mica/core/tensor.h>

namespace mica {

// In-place ops: they write into an existing tensor and return it. The target must not have overlapping elements: an
// expanded tensor throws.
//
// Autograd records them like other ops, if the target or the source requires a gradient. The target then has the
// history of the new value, through which gradients flow to the old value and to the source. If the target is a view,
// this includes its base and the base's other views; views created in no_grad or by detach() are independent tensors
// for autograd. While recording, writing to a leaf that requires a gradient, or to a view of one, throws; use no_grad
// to modify it. Each write increments the version, so that a backward that saved the old elements throws instead of
// using the new ones.

/// Sets every element of x to `value`, converted to x's dtype. For an integer dtype, the value must be representable.
const Tensor& fill_(const Tensor& x, double value);
/// Sets every element of x to 0.
const Tensor& zero_(const Tensor& x);

/// x = source, which broadcasts to x's shape and may have another dtype and device.
const Tensor& copy_(const Tensor& x, const Tensor& source);

/// x += alpha · y; y broadcasts to x's shape and shares its dtype (any but bool) and device. `alpha` must be an integer
/// for integer dtypes, which wrap around.
const Tensor& add_(const Tensor& x, const Tensor& y, double alpha = 1);

/// x *= y; y as in add_, or a number. Integers wrap around.
const Tensor& mul_(const Tensor& x, const Tensor& y);
const Tensor& mul_(const Tensor& x, double y);

}  // namespace mica
