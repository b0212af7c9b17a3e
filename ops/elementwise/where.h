#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// `a` where the bool tensor `condition` is true, else `b`. The shapes broadcast; a and b share a dtype, which may be
/// any, and all share a device. A number is rounded to the tensor's dtype. Differentiable in a and b.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
Tensor where(const Tensor& condition, const Tensor& a, double b);
Tensor where(const Tensor& condition, double a, const Tensor& b);

/// `value` where the bool tensor `mask`, which broadcasts to x's shape, is true, else x. Differentiable in x.
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value);

}  // namespace mica
