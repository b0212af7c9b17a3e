#pragma once

#include <mica/ops/elementwise/detail/elementwise_kernels.h>

namespace mica::detail {

/// dy · f′ as a differentiable op, for ops that contain f. v is f's result if f.from_output, else its argument.
Tensor unary_gradient(const kernels::UnaryFunction& f, const Tensor& dy, const Tensor& v);

}  // namespace mica::detail
