#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Copies of a tensor's elements in another arrangement. Any dtype and device; negative axes count from the last. All
// are differentiable.

/// Moves the elements by `shift` positions along an axis; those that leave its end enter at its beginning. A negative
/// shift moves them back.
Tensor roll(const Tensor& x, std::int64_t shift, std::int64_t axis);

/// The elements in reverse order along each of the axes, which must differ; along all without `axes`.
Tensor flip(const Tensor& x, const Dims& axes = {});

/// Repeats the whole tensor counts[i] times along axis i. With more counts than axes, the first are new axes. Throws
/// for fewer, and for negative ones.
Tensor repeat(const Tensor& x, const Dims& counts);

/// Adds `before` and `after` elements of this value to an axis. Throws if either is negative.
Tensor pad(const Tensor& x, std::int64_t axis, std::int64_t before, std::int64_t after, double value = 0);

/// 1 at the position of each index and 0 elsewhere: indices (…), int64 or int32 in [0, classes), to (…, classes) of a
/// numeric dtype. On the CPU an index out of range is an error. On CUDA, where a check would have to wait, its row is
/// 0. Not differentiable.
Tensor one_hot(const Tensor& indices, std::int64_t classes, DType dtype = int64);

}  // namespace mica
