#pragma once

#include <mica/core/dtype.h>

namespace mica::detail {

/// Throws, naming `op`, unless an element of `dtype` can hold the number: any for floats, integers in range for the
/// others.
void check_number(double value, DType dtype, const char* op);

}  // namespace mica::detail
