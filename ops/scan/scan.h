#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

// Scans along an axis: element j of the result depends on the elements 0 to j of x, and the result has x's shape. All
// are differentiable any number of times, and throw Error if x has no such axis.

/// The cumulative sum: y[j] = x[0] + … + x[j]. Sums of integers and booleans are int64 and wrap around; floats are
/// summed in float64 (in CUDA, parts of up to 1024 elements in float32) and rounded once.
Tensor cumsum(const Tensor& x, std::int64_t axis);

/// The cumulative product: y[j] = x[0] · … · x[j]. Products of integers and booleans are int64 and wrap around; floats
/// are multiplied in float64 and rounded once. The gradient needs no division, so it is right where elements are 0,
/// too.
Tensor cumprod(const Tensor& x, std::int64_t axis);

/// log(exp(x[0]) + … + exp(x[j])) for floating x, without overflow; computed in float64 and rounded once.
Tensor logcumsumexp(const Tensor& x, std::int64_t axis);

/// The largest and the smallest of x[0], …, x[j], and its position; of equal elements, the last. If one of them is NaN,
/// the result is NaN, at the position of the last NaN. Any dtype. The gradient goes to the elements at the positions.
MaxResult cummax(const Tensor& x, std::int64_t axis);
MaxResult cummin(const Tensor& x, std::int64_t axis);

}  // namespace mica
