#pragma once

// Argument checks shared by the public element-wise ops.

#include <mica/core/number.h>
#include <mica/core/tensor.h>

namespace mica::detail {

/// The broadcast shape of both. Throws unless dtypes and devices are equal.
Shape common_shape(const Tensor& a, const Tensor& b, const char* op);

/// The gradient of a tensor of this shape that was broadcast to the gradient's.
Tensor unbroadcast(const Tensor& gradient, const Shape& shape);

/// The number rounded to `dtype`.
double rounded(double value, DType dtype);

}  // namespace mica::detail
