#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Reading and adding elements by index. Indices are int64 or int32 in [0, length of the axis), on x's device. On the
// CPU, an index out of range is an error that names it. On CUDA, a check would have to wait for the device: reading
// gives NaN (0 in integer and bool tensors), and adding skips the element.
//
// All ops are differentiable any number of times in x and src. The ops that add take floats, int64 and int32 (which
// wrap around); on CUDA, fewer than 2³¹ elements. They add equal indices in order of position, and 16-bit floats in
// float32, rounded once. The other ops take any dtype.

/// y[i, j, k] = x[i, index[i, j, k], k], where j and index replace position `axis`. The index has as many axes as x and
/// may be shorter than x along the others; y has its shape.
Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index);

/// x plus src, with y[i, index[i, j, k], k] += src[i, j, k]. The index has as many axes as x and src, is nowhere longer
/// than src and, but for `axis`, nowhere longer than x. Elements of src outside of its shape are not used.
Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src);

/// The slices index[0], index[1], … of an axis: y[i, j, k] = x[i, index[j], k], for an index of one axis.
Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index);

/// x plus the slices of src: y[i, index[j], k] += src[i, j, k], for an index of one axis. src has x's shape, but for
/// `axis`, where it has the index's length.
Tensor index_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src);

/// The elements of x where the bool tensor `mask` is true, in row-major order: one axis. The shapes broadcast. On CUDA
/// it waits for the number of elements.
Tensor masked_select(const Tensor& x, const Tensor& mask);

}  // namespace mica
