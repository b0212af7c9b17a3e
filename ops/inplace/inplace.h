#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Writes into a tensor that is there already, and returns it. Each element of the target must have a place of its own:
// an expanded tensor throws.
//
// Autograd records these as it does other ops, if the target or the source requires a gradient: afterwards the target
// stands for the new value, with a gradient for the old one and for the source. If it is a view, so do the tensor it is
// a view of and that one's other views; but views made in no_grad or by detach() are tensors of their own to autograd.
// While recording, a leaf that requires a gradient, or a view of one, is no target: that throws, and no_grad is how to
// change it. The version is counted up, so that a backward which saved the old elements throws instead of using the
// new.

/// x = value everywhere, converted to x's dtype. A number must be one that an integer dtype can hold.
const Tensor& fill_(const Tensor& x, double value);
/// x = 0 everywhere.
const Tensor& zero_(const Tensor& x);

/// x = source, which broadcasts to x's shape and may have another dtype and device.
const Tensor& copy_(const Tensor& x, const Tensor& source);

/// x += alpha · y; y broadcasts to x's shape and shares its dtype (any but bool) and device. `alpha` must be an integer
/// for integer dtypes.
const Tensor& add_(const Tensor& x, const Tensor& y, double alpha = 1);

/// x *= y; y as in add_, or a number.
const Tensor& mul_(const Tensor& x, const Tensor& y);
const Tensor& mul_(const Tensor& x, double y);

}  // namespace mica
