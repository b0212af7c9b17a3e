#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Looks up rows of an embedding table: y[i, :] = weight[indices[i], :].
///
/// @param weight   (V, C), floating.
/// @param indices  int64 or int32 of any shape (…), in [0, V), on weight's device.
/// @return (…, C) of weight's dtype, row-major. Differentiable in weight any number of times.
///
/// On the CPU, an index out of range is an Error that names it. On CUDA, where an error would have to wait for the
/// device, its row of y is NaN instead and contributes nothing to the gradient.
///
/// The gradient of a row of weight is the sum over the positions that use it, rounded once, in an order that depends
/// on the indices alone. Throws Error before anything is computed if a shape, dtype or device does not match.
Tensor embedding(const Tensor& weight, const Tensor& indices);

}  // namespace mica
