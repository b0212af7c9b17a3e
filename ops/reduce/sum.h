#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Sums and means: see reduce.h for what holds for all reductions.

/// Σ x over the axes; an empty sum is 0. Sums of integers and booleans are int64 and wrap around; 16-bit floats are
/// summed in float32.
Tensor sum(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// Σ x / n over the axes, for floating x; an empty mean is NaN.
Tensor mean(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// Sums x over the axes along which a tensor of shape `shape` would be broadcast to x.shape(). The result has that
/// shape; this is the backward of broadcasting. Returns x itself if the shapes are equal. Throws unless `shape`
/// broadcasts to x.shape().
Tensor sum_to(const Tensor& x, const Shape& shape);

}  // namespace mica
