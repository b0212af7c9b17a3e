#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Concatenates tensors along an existing axis. At least one tensor; equal dtypes and devices, and equal shapes except
/// along the axis. Differentiable.
Tensor cat(const Tensors& tensors, std::int64_t axis = 0);

/// Stacks tensors along a new axis, number `axis` of the result. At least one tensor; equal shapes, dtypes and devices.
/// Differentiable.
Tensor stack(const Tensors& tensors, std::int64_t axis = 0);

}  // namespace mica
