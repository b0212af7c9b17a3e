#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// The cumulative sum along an axis: y[j] = x[0] + … + x[j], of x's shape. Sums of integers and booleans are int64 and
/// wrap around; floats are summed in float64 (in CUDA, parts of up to 1024 elements in float32) and rounded once.
/// Differentiable any number of times. Throws Error if x has no such axis.
Tensor cumsum(const Tensor& x, std::int64_t axis);

}  // namespace mica
