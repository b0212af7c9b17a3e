#pragma once

// What other ops use of dropout.

#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::detail {

/// y = what dropout leaves of x, both row-major and of one shape; y may be x.
void write_dropped(const Tensor& y, const Tensor& x, const ElementDropout& dropout);

/// The same as a recorded op. Linear, so that it is its own backward.
Tensor dropped(const Tensor& x, const ElementDropout& dropout);

}  // namespace mica::detail
