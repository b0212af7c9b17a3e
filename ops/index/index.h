#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Reading and adding elements by index, as in PyTorch. Indices are int64 or int32 in [0, length of the axis), on x's
// device. On the CPU, an index out of range is an Error that names it. On CUDA, an error would have to wait for the
// device; instead, reading gives NaN (0 in integer and bool tensors), and adding skips the element.
//
// All ops are differentiable any number of times in x and src, and throw Error if a shape, dtype or device does not
// match. Those that read take any dtype. Those that add take floats, int64 and int32 (which wrap around), and on CUDA
// fewer than 2³¹ elements; they add elements with equal indices in order of position, in float64 or, on CUDA, in
// float32 for groups of up to 16, and round the sum once.
//
// The formulas below are for three axes and axis = 1.

/// y[i, j, k] = x[i, index[i, j, k], k]. The index has as many axes as x and, except along `axis`, must not be longer
/// than x; y has the shape of the index.
Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index);

/// y = x, then y[i, index[i, j, k], k] += src[i, j, k] for all elements of the index. x, index and src have the same
/// number of axes. The index must not be longer than src along any axis, nor longer than x along any axis except
/// `axis`. Elements of src outside of the index's shape are not used.
Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src);

/// y[i, j, k] = x[i, index[j], k], for an index of one axis.
Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index);

/// y = x, then y[i, index[j], k] += src[i, j, k], for an index of one axis. src has x's shape, except along `axis`,
/// where it has the index's length.
Tensor index_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src);

/// The elements of x where the bool tensor `mask` is true, in row-major order, as a tensor of one axis. The shapes of x
/// and mask broadcast. On CUDA, waits for the device, since the result's length is needed on the host.
Tensor masked_select(const Tensor& x, const Tensor& mask);

/// The positions of the elements of x that are not 0, in row-major order: int64 (count, axes of x). Any dtype; NaN is
/// not 0. On CUDA, waits for the device. Not differentiable.
Tensor nonzero(const Tensor& x);

}  // namespace mica
