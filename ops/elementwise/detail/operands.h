#pragma once

// Argument checks shared by the public element-wise ops.

#include <mica/core/detail/number.h>
#include <mica/core/tensor.h>

namespace mica::detail {

/// The shape that a and b broadcast to. Throws Error, starting with `op`, unless they do and their dtypes and devices
/// are equal.
Shape common_shape(const Tensor& a, const Tensor& b, const char* op);

/// The gradient of a tensor of shape `shape` that was broadcast to gradient.shape(): sums over the broadcast axes.
Tensor unbroadcast(const Tensor& gradient, const Shape& shape);

/// The number rounded to `dtype`.
double rounded(double value, DType dtype);

}  // namespace mica::detail
