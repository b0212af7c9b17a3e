#pragma once

// Functions of embedding for other ops.

#include <mica/core/tensor.h>

namespace mica::detail {

/// Throws Error, naming `op`, unless `indices` are valid indices for rows of `weight`. Returns them row-major, as
/// int64.
Tensor checked_indices(const char* op, const Tensor& weight, const Tensor& indices);

/// For the backward of an op whose input number `input` is a table: its gradient, from dy (…, C) of the rows
/// `indices` (…). Adds to the table's existing gradient where possible (autograd::take_pending_gradient).
/// Differentiable in dy.
Tensor embedding_gradient(const Tensor& dy, const Tensor& indices, const Shape& table, int input);

}  // namespace mica::detail
