#pragma once

#include <initializer_list>

#include <mica/core/tensor.h>

namespace mica {

// A tensor of images has the shape (N, C, spatial axes…). Its elements may lie in memory in another order, channels
// last: as in a row-major tensor of shape (N, spatial axes…, C). On GPUs, convolutions compute in this layout, and ops
// between them keep it. The layout changes strides only: shapes, axes and results are the same.

/// Whether x has 4 or 5 axes and its elements lie channels last, without gaps. Strides of axes of length 1 do not
/// matter, so that a tensor can be both channels last and contiguous.
bool is_channels_last(const Tensor& x);

/// A new uninitialized tensor whose elements lie channels last. Throws unless `shape` has 4 or 5 axes.
Tensor empty_channels_last(const Shape& shape, DType dtype = float32, Device device = Device::cpu());

/// A new uninitialized tensor in the layout of the tensors that it is computed from: channels last if those of `like`
/// that have this shape all are, and one of them is not contiguous; else row-major. Null and undefined ones are
/// ignored.
Tensor empty_in_layout(const Shape& shape, DType dtype, Device device, std::initializer_list<const Tensor*> like);
/// The same for one tensor, whose sizes may differ from `shape`: images of another size, for example.
Tensor empty_in_layout(const Shape& shape, const Tensor& like);

}  // namespace mica
