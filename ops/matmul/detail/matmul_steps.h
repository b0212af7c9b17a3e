#pragma once

#include <cstddef>
#include <utility>

#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::detail {

// Steps shared by ops with matrix products. Not recorded.

/// kernels::matmul for operands with any strides and sizes, including 0.
void multiply(kernels::MatmulArgs args);

/// The product of two matrices, as the gradient of input `i` in the backward of a Function. On CUDA, if that input
/// already has a gradient from other uses, the kernel adds the product to it.
Tensor product_as_gradient(std::size_t i, const Tensor& a, const Tensor& b);

/// x (…, n), reshaped to (rows, n). No copy is made if x is a matrix that a product can read.
Tensor rows_of(const Tensor& x, std::int64_t rows);

/// The product of all sizes but the last.
std::int64_t row_count(const Shape& shape);

/// dz = dy · f′ and the sum of its rows, in one pass. dy (rows, n) is contiguous and not empty; v as in
/// kernels::ActivationBackward.
std::pair<Tensor, Tensor> gradients_of_sums(Activation activation, const Tensor& dy, const Tensor& v);

}  // namespace mica::detail
