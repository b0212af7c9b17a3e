#pragma once

// What other ops use of dropout.

#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::detail {

/// Writes dropout(x) to y. Both are row-major and have the same shape; y may be x.
void write_dropped(const Tensor& y, const Tensor& x, const ElementDropout& dropout);

/// dropout(x) as a recorded op. It is linear and multiplies element by element, so that its backward is the same op.
Tensor dropped(const Tensor& x, const ElementDropout& dropout);

}  // namespace mica::detail
