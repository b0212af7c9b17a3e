#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Copies of a tensor's elements in another arrangement. Any dtype and device; negative axes count from the last. All
// are differentiable unless stated otherwise.

/// Rotates the elements by `shift` positions along an axis: those moved past its end reappear at its beginning. A
/// negative shift rotates the other way.
Tensor roll(const Tensor& x, std::int64_t shift, std::int64_t axis);

/// Reverses the order of the elements along each of the axes; without `axes`, along all. Throws if an axis occurs
/// twice.
Tensor flip(const Tensor& x, const Dims& axes = {});

/// Repeats the whole tensor counts[i] times along axis i of the result. If there are more counts than axes, x gets
/// leading axes of length 1 first. Throws if there are fewer, or if a count is negative.
Tensor repeat(const Tensor& x, const Dims& counts);

/// Like repeat(), but with fewer counts than axes, they count for the last axes, and the others are not repeated.
Tensor tile(const Tensor& x, const Dims& counts);

/// Adds `before` elements of the given value at the beginning of an axis, and `after` elements at its end. Throws if
/// either number is negative.
Tensor pad(const Tensor& x, std::int64_t axis, std::int64_t before, std::int64_t after, double value = 0);

/// One-hot vectors: for indices (…), int64 or int32 in [0, classes), returns (…, classes) of a numeric dtype, which is
/// 1 at the position of each index and 0 elsewhere. On the CPU, an index out of range is an Error. On CUDA, where an
/// error would have to wait for the device, its row is 0 instead. Not differentiable.
Tensor one_hot(const Tensor& indices, std::int64_t classes, DType dtype = int64);

}  // namespace mica
