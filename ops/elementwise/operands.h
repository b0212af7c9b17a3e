#pragma once

// What the public element-wise ops check before they run.

#include <mica/core/number.h>
#include <mica/core/tensor.h>

namespace mica::detail {

/// The shape both broadcast to; throws unless dtype and device are the same.
Shape common_shape(const Tensor& a, const Tensor& b, const char* op);

/// The number as an element of `dtype` has it.
double rounded(double value, DType dtype);

}  // namespace mica::detail
