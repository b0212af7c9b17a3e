#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// `a` where the bool tensor `condition` is true, else `b`. The shapes broadcast. a and b have the same dtype, which
/// may be any; all three are on one device. A number is rounded to the tensor's dtype. Differentiable in a and b.
/// Throws Error if a shape, dtype or device does not match.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
Tensor where(const Tensor& condition, const Tensor& a, double b);
Tensor where(const Tensor& condition, double a, const Tensor& b);

/// `value` where the bool tensor `mask` is true, else x, for x of any dtype. The mask broadcasts to x's shape and is on
/// x's device. Differentiable in x. Throws Error if a shape, dtype or device does not match.
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value);

}  // namespace mica
