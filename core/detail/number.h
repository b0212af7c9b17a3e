#pragma once

#include <mica/core/dtype.h>

namespace mica::detail {

/// Throws an error that starts with `op` unless an element of `dtype` can hold `value`. A floating dtype holds any
/// number; other dtypes hold integers in their range.
void check_number(double value, DType dtype, const char* op);

}  // namespace mica::detail
