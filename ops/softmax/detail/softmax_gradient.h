#pragma once

// The part of softmax that other ops use.

#include <mica/core/tensor.h>

namespace mica::detail {

/// The gradient of y = softmax(x) along an axis: dx = y · (dy − Σ dy · y), in one pass. Differentiable in dy and y.
Tensor softmax_gradient(const Tensor& dy, const Tensor& y, int axis);

}  // namespace mica::detail
