#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Other looks at the same elements: nothing is copied, except where it says so, and writing in place through one is
// seen through all. Any dtype and device; axes may be negative, counting from the last. All are differentiable.

/// A row-major copy of `x` with memory of its own.
Tensor clone(const Tensor& x);

/// `x` itself if it is row-major without gaps, else such a copy.
Tensor contiguous(const Tensor& x);

/// The elements in row-major order under another shape of as many elements; one size may be -1 and is worked out. A
/// view where strides allow it, else a copy.
Tensor reshape(const Tensor& x, const Shape& shape);

/// As reshape, but throws where it would have to copy.
Tensor view(const Tensor& x, const Shape& shape);

/// Axes `from` to `to`, both included, as one.
Tensor flatten(const Tensor& x, std::int64_t from = 0, std::int64_t to = -1);

/// Swaps two axes.
Tensor transpose(const Tensor& x, std::int64_t a, std::int64_t b);

/// Axis i of the result is axis axes[i] of x. Every axis once.
Tensor permute(const Tensor& x, const Dims& axes);

/// Positions start, start + step, … before `end` of an axis. Negative positions count from the end and both are
/// clamped to the axis, as in Python; step ≥ 1.
Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step = 1);

/// One position of an axis, which disappears. Throws if there is no such position.
Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index);

/// Stretches axes of length 1, and adds axes in front; -1 keeps an axis as it is.
Tensor expand(const Tensor& x, const Shape& shape);

/// Drops an axis if its length is 1; without an axis, all of length 1.
Tensor squeeze(const Tensor& x, std::int64_t axis);
Tensor squeeze(const Tensor& x);

/// Adds an axis of length 1, which will be number `axis` of the result.
Tensor unsqueeze(const Tensor& x, std::int64_t axis);

/// Pieces of `size` along an axis, the last one shorter if need be.
Tensors split(const Tensor& x, std::int64_t size, std::int64_t axis = 0);
/// Pieces of these sizes, which add up to the axis.
Tensors split(const Tensor& x, const std::vector<std::int64_t>& sizes, std::int64_t axis = 0);

}  // namespace mica
