#pragma once

// What other ops use of softmax.

#include <mica/core/tensor.h>

namespace mica::detail {

/// y · (dy − Σ dy · y) along the axis: the gradient of softmax, whose result is y, in one pass. Differentiable in both.
Tensor softmax_gradient(const Tensor& dy, const Tensor& y, int axis);

}  // namespace mica::detail
