#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Reductions. `axes` may be negative and in any order, without duplicates; an empty list means all axes. Reduced axes
// are removed or, with keepdim, kept with length 1. All reductions are deterministic: an element of the result depends
// only on its own inputs, not on the number of threads or the size of the grid.

/// Σ x over the axes; an empty sum is 0. Sums of integers and booleans are int64 and wrap around; 16-bit floats are
/// summed in float32.
Tensor sum(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// The product of x over the axes; an empty product is 1. Products of integers and booleans are int64 and wrap around;
/// those of 16-bit floats are computed in float32. In pairs, then pairs of pairs, …: log₂ n steps of mul(), so that the
/// gradient is right where elements are 0, and for higher derivatives.
Tensor prod(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// Σ x / n over the axes, for floating x; an empty mean is NaN.
Tensor mean(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// Σ (x - mean(x))² / max(n - correction, 0) over the axes, for floating x, in two passes. With correction 1 it is the
/// unbiased estimate, which is NaN for a single element.
Tensor var(const Tensor& x, const Dims& axes = {}, double correction = 1, bool keepdim = false);

/// √var. Where it is 0, its derivative is 0, too.
Tensor stddev(const Tensor& x, const Dims& axes = {}, double correction = 1, bool keepdim = false);

/// (Σ |x|ᵖ)^(1/p) over the axes, for floating x: the Euclidean length unless p is given. For p = ∞ the largest |x|, for
/// −∞ the smallest, for 0 the number of elements that are not 0. Where the norm is 0, its derivative is 0. 16-bit
/// floats are computed in float32.
Tensor vector_norm(const Tensor& x, const Dims& axes = {}, double p = 2, bool keepdim = false);

/// log Σ exp(x) over the axes, for floating x, without overflow; -inf where all x are -inf and over nothing.
Tensor logsumexp(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// The largest and the smallest element; NaN if there is one. Throws for a tensor without elements. The gradient is
/// shared evenly among equal elements.
Tensor max(const Tensor& x);
Tensor min(const Tensor& x);

/// The largest and the smallest element over the axes, none of which may be empty; NaN if there is one. The gradient is
/// shared evenly among equal elements.
Tensor amax(const Tensor& x, const Dims& axes = {}, bool keepdim = false);
Tensor amin(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

struct MaxResult {
  Tensor values;
  Tensor indices;  ///< int64
};

/// The largest and the smallest element along an axis, which must not be empty, and where it is: the first index where
/// several are equal, the first NaN if there is one. The gradient goes to that element.
MaxResult max(const Tensor& x, std::int64_t axis, bool keepdim = false);
MaxResult min(const Tensor& x, std::int64_t axis, bool keepdim = false);

/// The index of the largest and of the smallest element, int64: the first where several are equal, the first NaN if
/// there is one. Without an axis it counts all elements in row-major order.
Tensor argmax(const Tensor& x);
Tensor argmin(const Tensor& x);
Tensor argmax(const Tensor& x, std::int64_t axis, bool keepdim = false);
Tensor argmin(const Tensor& x, std::int64_t axis, bool keepdim = false);

/// x summed over the axes along which `shape` was broadcast to x's: the gradient of a broadcast. Throws unless `shape`
/// broadcasts to x.shape(). x itself where the shapes are equal.
Tensor sum_to(const Tensor& x, const Shape& shape);

}  // namespace mica
