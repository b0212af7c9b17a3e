#pragma once

#include <mica/ops/elementwise/elementwise_kernels.h>

namespace mica::detail {

/// dy · f′, where v is f's result if f.from_output says so, else its argument: the backward of every f, as an op for
/// those that have f inside them.
Tensor unary_gradient(const kernels::UnaryFunction& f, const Tensor& dy, const Tensor& v);

}  // namespace mica::detail
