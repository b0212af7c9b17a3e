#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/reduce/sum.h>

namespace mica {

// Reductions. `axes` may be negative and in any order, without duplicates; an empty list means all axes. Reduced axes
// are removed or, with keepdim, kept with length 1. All reductions are deterministic: the bits of an element of the
// result depend only on the elements it is computed from, not on the number of threads or the size of the grid. All are
// differentiable, except for indices.

/// The product of x over the axes; an empty product is 1. Products of integers and booleans are int64 and wrap around;
/// those of 16-bit floats are computed in float32. Elements are multiplied in pairs, the results again in pairs, and so
/// on: log₂ n calls of mul(). That makes gradients of any order right, also where elements are 0.
Tensor prod(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// The variance Σ (x − mean(x))² / max(n − correction, 0) over the axes, for floating x, in two passes. With correction
/// 1 it is the unbiased estimate (Bessel's correction), which is NaN for a single element.
Tensor var(const Tensor& x, const Dims& axes = {}, double correction = 1, bool keepdim = false);

/// The standard deviation √var. Where it is 0, its derivative is 0.
Tensor stddev(const Tensor& x, const Dims& axes = {}, double correction = 1, bool keepdim = false);

/// The norm (Σ |x|ᵖ)^(1/p) over the axes, for floating x; by default the Euclidean norm. For p = ∞ it is the largest
/// |x|, for p = −∞ the smallest, for p = 0 the number of nonzero elements. Where the norm or an element is 0, the
/// derivative is 0. 16-bit floats are computed in float32. Throws if p is NaN.
Tensor vector_norm(const Tensor& x, const Dims& axes = {}, double p = 2, bool keepdim = false);

/// log Σ exp(x) over the axes, for floating x, without overflow. It is −inf if all elements are −inf or there are none.
Tensor logsumexp(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

/// The largest and the smallest element of x; NaN if any element is NaN. Throws for a tensor without elements. The
/// gradient is shared evenly among all elements equal to the result.
Tensor max(const Tensor& x);
Tensor min(const Tensor& x);

/// The largest and the smallest element over the axes, none of which may be empty; NaN if any of the elements is NaN.
/// The gradient is shared evenly among all elements equal to the result.
Tensor amax(const Tensor& x, const Dims& axes = {}, bool keepdim = false);
Tensor amin(const Tensor& x, const Dims& axes = {}, bool keepdim = false);

struct MaxResult {
  Tensor values;
  Tensor indices;  ///< int64
};

/// The largest and the smallest element along an axis, which must not be empty, and its index. If several are equal,
/// the first; if there are NaNs, the first NaN. The gradient goes to that element only.
MaxResult max(const Tensor& x, std::int64_t axis, bool keepdim = false);
MaxResult min(const Tensor& x, std::int64_t axis, bool keepdim = false);

/// The index of the largest and of the smallest element, int64. If several are equal, the first; if there are NaNs, the
/// first NaN. Without an axis, the index counts all elements in row-major order. Throws if there are no elements.
Tensor argmax(const Tensor& x);
Tensor argmin(const Tensor& x);
Tensor argmax(const Tensor& x, std::int64_t axis, bool keepdim = false);
Tensor argmin(const Tensor& x, std::int64_t axis, bool keepdim = false);

}  // namespace mica
