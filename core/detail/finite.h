#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// "NaN" if `x`, of a floating dtype, contains a NaN, else "Inf" if it contains an infinity, else null. Waits for x's
/// device. Defined in ops/reduce, since it is a reduction.
const char* first_fault(const Tensor& x);

}  // namespace mica
