#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Views share elements with their input: nothing is copied unless stated otherwise, and an in-place write to one is
// visible in all. Any dtype and device; negative axes count from the last. All are differentiable. They throw Error if
// an axis does not exist or a size does not match.

/// A row-major copy of `x` in new memory.
Tensor clone(const Tensor& x);

/// `x` itself if it is contiguous, else a contiguous copy.
Tensor contiguous(const Tensor& x);

/// The same elements, in row-major order, in another shape. One size may be -1; it is inferred from the number of
/// elements. A view if the strides allow it, else a copy.
Tensor reshape(const Tensor& x, const Shape& shape);

/// Like reshape(), but throws if a copy would be needed.
Tensor view(const Tensor& x, const Shape& shape);

/// Merges the axes `from` to `to`, inclusive, into one.
Tensor flatten(const Tensor& x, std::int64_t from = 0, std::int64_t to = -1);

/// Swaps two axes.
Tensor transpose(const Tensor& x, std::int64_t a, std::int64_t b);

/// Axis i of the result is axis axes[i] of x. `axes` is a permutation.
Tensor permute(const Tensor& x, const Dims& axes);

/// The positions start, start + step, … of an axis, as long as they are before `end`. As in Python, a negative `start`
/// or `end` counts from the axis's end, and both are clamped to the axis. Throws unless step ≥ 1.
Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step = 1);

/// The elements at one position of an axis, which is removed. Throws if the position is out of range.
Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index);

/// Broadcasts axes of length 1 to the lengths in `shape`, and adds leading axes if `shape` has more than x. A length of
/// -1 keeps the axis as it is.
Tensor expand(const Tensor& x, const Shape& shape);

/// Removes an axis if its length is 1; without `axis`, all axes of length 1.
Tensor squeeze(const Tensor& x, std::int64_t axis);
Tensor squeeze(const Tensor& x);

/// Inserts an axis of length 1 at position `axis` of the result.
Tensor unsqueeze(const Tensor& x, std::int64_t axis);

/// Splits an axis into parts of length `size`; the last one may be shorter. Throws unless size ≥ 1.
Tensors split(const Tensor& x, std::int64_t size, std::int64_t axis = 0);
/// Splits an axis into parts of the given lengths, which must add up to its length.
Tensors split(const Tensor& x, const std::vector<std::int64_t>& sizes, std::int64_t axis = 0);

}  // namespace mica
