#pragma once

// Functions of index for other ops.

#include <mica/core/tensor.h>

namespace mica::detail {

/// gather(), whose errors begin with `op`.
Tensor gather_for(const char* op, const Tensor& x, std::int64_t axis, const Tensor& index);

}  // namespace mica::detail
