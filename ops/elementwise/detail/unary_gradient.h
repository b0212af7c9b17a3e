#pragma once

#include <mica/ops/elementwise/detail/elementwise_kernels.h>

namespace mica::detail {

// The backward of an activation f inside other ops. v is f's result if f.from_output, else its argument.

/// dy · f′ as a differentiable op.
Tensor unary_gradient(const kernels::UnaryFunction& f, const Tensor& dy, const Tensor& v);
/// t · ∂f′/∂v by recorded ops.
Tensor unary_curvature(const kernels::UnaryFunction& f, const Tensor& t, const Tensor& v);

}  // namespace mica::detail
