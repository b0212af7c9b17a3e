#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Writes into a tensor that is there already, and returns it. Autograd does not record these: while gradients are
// enabled, a tensor that requires one, as target or as source, is an error (use no_grad). The target's version is
// counted up, so that a backward which saved the old values says so instead of using the new ones. Each element of the
// target must have a place of its own: an expanded tensor throws.

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
