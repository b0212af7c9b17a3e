#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// min(max(x, low), high) for tensors that broadcast, of any numeric dtype; NaN if any of them is NaN. An undefined
/// tensor is no bound. The gradient goes to x where low ≤ x ≤ high, bounds included, and elsewhere to the bound that is
/// the result. Throws if neither bound is defined, or if a shape, dtype or device does not match.
Tensor clamp(const Tensor& x, const Tensor& low, const Tensor& high);

/// a + weight · (b − a) for floating dtypes: a where the weight is 0, b where it is 1. The tensors have the same dtype
/// and device and broadcast. 16-bit floats are computed in float32. Differentiable in a, b and a tensor of weights.
Tensor lerp(const Tensor& a, const Tensor& b, double weight);
Tensor lerp(const Tensor& a, const Tensor& b, const Tensor& weight);

}  // namespace mica
