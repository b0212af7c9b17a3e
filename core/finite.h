#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// "NaN" if floating `x` contains a NaN, else "Inf" if it contains an infinity, else null. Synchronizes with x's
/// device. Defined in ops/reduce, since it is a reduction.
const char* first_fault(const Tensor& x);

}  // namespace mica
