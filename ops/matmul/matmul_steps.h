#pragma once

#include <cstddef>
#include <utility>

#include <mica/ops/matmul/matmul_kernels.h>

namespace mica::detail {

// What ops with matrix products in them share. Nothing here is recorded.

/// kernels::matmul for operands with any strides and sizes, also none.
void multiply(kernels::MatmulArgs args);

/// a · b, both of two axes, as the gradient of input `i` in the backward of a Function. On CUDA, where other uses of
/// that input have left a gradient, the product is added to it by its own kernel.
Tensor product_as_gradient(std::size_t i, const Tensor& a, const Tensor& b);

/// x (…, n) as (rows, n): without a copy also where x is a matrix that a product can read.
Tensor rows_of(const Tensor& x, std::int64_t rows);

/// The product of all sizes but the last.
std::int64_t row_count(const Shape& shape);

/// dz = dy · f′ and the sum of its rows, in one pass. dy (rows, n) is contiguous and not empty; v as in
/// kernels::ActivationBackward.
std::pair<Tensor, Tensor> gradients_of_sums(Activation activation, const Tensor& dy, const Tensor& v);

}  // namespace mica::detail
