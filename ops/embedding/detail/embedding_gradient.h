#pragma once

// What other ops use of embedding.

#include <mica/core/tensor.h>

namespace mica::detail {

/// Throws Error, naming `op`, unless `indices` are valid indices for rows of `weight`. Returns them row-major, as
/// int64.
Tensor checked_indices(const char* op, const Tensor& weight, const Tensor& indices);

/// The gradient of an embedding table of shape `table`, given the gradient dy (…, C) of the rows that `indices` (…)
/// select. Called in the backward of an op whose input number `input` is the table. If that input already has a
/// gradient, adds to it where possible (autograd::take_pending_gradient). Differentiable in dy.
Tensor embedding_gradient(const Tensor& dy, const Tensor& indices, const Shape& table, int input);

}  // namespace mica::detail
