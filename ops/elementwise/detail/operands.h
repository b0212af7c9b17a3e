#pragma once

// Argument checks shared by the public element-wise ops.

#include <mica/core/detail/number.h>
#include <mica/core/tensor.h>

namespace mica::detail {

/// The shape that a and b broadcast to. Throws Error, starting with `op`, unless they do and their dtypes and devices
/// are equal.
Shape common_shape(const Tensor& a, const Tensor& b, const char* op);

/// A new tensor of that shape for a result computed from a and, if defined, b. Channels last if both are: see
/// core/channels_last.h.
Tensor new_result(const Shape& shape, DType dtype, const Tensor& a, const Tensor& b = {});

/// The gradient of a tensor of shape `shape` that was broadcast to gradient.shape(): sums over the broadcast axes.
Tensor unbroadcast(const Tensor& gradient, const Shape& shape);

/// The number rounded to `dtype`.
double rounded(double value, DType dtype);

}  // namespace mica::detail
