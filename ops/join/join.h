#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Concatenates one or more tensors along an existing axis. Their dtypes and devices are equal, and so are their shapes
/// except along the axis; otherwise cat throws. Differentiable.
Tensor cat(const Tensors& tensors, std::int64_t axis = 0);

/// Stacks one or more tensors of equal shapes, dtypes and devices along a new axis, which is axis `axis` of the result.
/// Throws if they are not equal. Differentiable.
Tensor stack(const Tensors& tensors, std::int64_t axis = 0);

}  // namespace mica
