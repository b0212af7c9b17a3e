#pragma once

// What other ops use of layer_norm.

#include <array>

#include <mica/core/tensor.h>

namespace mica::detail {

/// The gradients of layer_norm's x, weight and bias, those that are not wanted undefined; differentiable in dy, x and
/// weight. A row is what lies under the last row_dim axes of x; mean and rstd are what the kernel told of x, undefined
/// if it has no elements; weight and bias, of weight_dtype, may be undefined.
Tensors layer_norm_gradient(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                            const Tensor& rstd, int row_dim, double eps, DType weight_dtype,
                            std::array<bool, 3> wanted);

}  // namespace mica::detail
