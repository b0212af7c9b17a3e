#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// The sums of the elements up to each position of an axis: y[j] = x[0] + … + x[j]. Sums of integers and booleans are
/// int64 and wrap around; 16-bit floats are summed in float32 and rounded once. Differentiable any number of times.
Tensor cumsum(const Tensor& x, std::int64_t axis);

}  // namespace mica
