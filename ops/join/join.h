#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// The tensors one after another along an axis that they already have. At least one; equal dtypes, devices and shapes,
/// the axis aside. Differentiable.
Tensor cat(const Tensors& tensors, std::int64_t axis = 0);

/// The tensors side by side along a new axis, number `axis` of the result. At least one; all alike. Differentiable.
Tensor stack(const Tensors& tensors, std::int64_t axis = 0);

}  // namespace mica
