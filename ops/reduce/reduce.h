#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Reductions. `axes` may be negative and in any order, each axis once; none given means all of them. A reduced axis
// goes away or, with keepdim, stays with length 1. All are deterministic: what an element of the result is depends on
// its own inputs only, not on the number of threads or the size of the grid.

/// Σ x over the axes; 0 over nothing. Sums of integers and booleans are int64; 16-bit floats are summed in float32.
Tensor sum(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// Σ x / n over the axes, for floating x; NaN over nothing.
Tensor mean(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// x summed over the axes along which `shape` was broadcast to x's: the gradient of a broadcast. Throws unless `shape`
/// broadcasts to x.shape(). x itself where the shapes are equal.
Tensor sum_to(const Tensor& x, const Shape& shape);

}  // namespace mica
