#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// "NaN" if an element of floating `x` is one, else "Inf" if one is infinite, else null. Found on x's device; waits for
/// it. It reduces, so it is defined in ops/reduce.
const char* first_fault(const Tensor& x);

}  // namespace mica
