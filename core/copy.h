#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Basic data movement. Not recorded by autograd, unlike ops/view.

/// Copies src into dst; dtypes and devices may differ. Shapes must be equal; any strides. Not counted as an in-place
/// write: meant for filling new tensors.
void copy_into(const Tensor& dst, const Tensor& src);

/// copy_into(dst[i], src[i]) for each i, in no fixed order: no destination may overlap any other tensor. On a GPU, one
/// kernel copies up to 120 contiguous tensors that keep their dtype, or go from 16 bits to float32.
void copy_all_into(const Tensors& dst, const Tensors& src);

/// x itself if it is contiguous, else a contiguous copy. No history.
Tensor contiguous_data(const Tensor& x);

/// Sets every element to `value`, converted to the tensor's dtype. Not counted as an in-place write.
void fill_data(const Tensor& x, double value);

/// dst += src, for equal shapes, dtypes and devices. Not counted as an in-place write.
void add_into(const Tensor& dst, const Tensor& src);

}  // namespace mica
