#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Views share elements with their input: nothing is copied unless stated otherwise, and an in-place write through one
// is visible through all. Any dtype and device; negative axes count from the last. All are differentiable.

/// A row-major copy of `x` in new memory.
Tensor clone(const Tensor& x);

/// `x` itself if it is contiguous, else a contiguous copy.
Tensor contiguous(const Tensor& x);

/// The elements in row-major order in another shape with the same number of elements; one size may be -1 and is
/// inferred. A view if the strides allow it, else a copy.
Tensor reshape(const Tensor& x, const Shape& shape);

/// As reshape, but throws if a copy would be needed.
Tensor view(const Tensor& x, const Shape& shape);

/// Merges the axes `from` to `to`, inclusive, into one.
Tensor flatten(const Tensor& x, std::int64_t from = 0, std::int64_t to = -1);

/// Swaps two axes.
Tensor transpose(const Tensor& x, std::int64_t a, std::int64_t b);

/// Axis i of the result is axis axes[i] of x. `axes` is a permutation.
Tensor permute(const Tensor& x, const Dims& axes);

/// Positions start, start + step, … before `end` of an axis. Negative positions count from the end and both are
/// clamped to the axis, as in Python; step ≥ 1.
Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step = 1);

/// The elements at one position of an axis, which is removed. Throws if the position is out of range.
Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index);

/// Broadcasts axes of length 1 and adds leading axes; -1 keeps the length of an axis.
Tensor expand(const Tensor& x, const Shape& shape);

/// Removes an axis if its length is 1; without `axis`, all axes of length 1.
Tensor squeeze(const Tensor& x, std::int64_t axis);
Tensor squeeze(const Tensor& x);

/// Inserts an axis of length 1 at position `axis` of the result.
Tensor unsqueeze(const Tensor& x, std::int64_t axis);

/// Splits an axis into pieces of `size`; the last one may be shorter.
Tensors split(const Tensor& x, std::int64_t size, std::int64_t axis = 0);
/// Splits an axis into pieces of these sizes, which must add up to its length.
Tensors split(const Tensor& x, const std::vector<std::int64_t>& sizes, std::int64_t axis = 0);

}  // namespace mica
