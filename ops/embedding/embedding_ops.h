#pragma once

// What other ops use of embedding.

#include <mica/core/tensor.h>

namespace mica::detail {

/// Throws Error in the name of `op` unless one can look up rows `indices` of `weight`. Returns them row-major, as
/// int64.
Tensor checked_indices(const char* op, const Tensor& weight, const Tensor& indices);

/// For the backward of an op whose input number `input` is a table: its gradient, from dy (…, C) of the rows `indices`
/// (…). Added to what the table's gradient already is, if that may be (autograd::take_gradient_so_far). Differentiable
/// in dy.
Tensor embedding_gradient(const Tensor& dy, const Tensor& indices, const Shape& table, int input);

}  // namespace mica::detail
