#pragma once

// What other ops use of index.

#include <mica/core/tensor.h>

namespace mica::detail {

/// gather(), with errors that begin with `op` instead of "gather".
Tensor gather_for(const char* op, const Tensor& x, std::int64_t axis, const Tensor& index);

}  // namespace mica::detail
