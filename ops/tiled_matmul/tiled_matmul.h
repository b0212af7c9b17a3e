#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/matmul/matmul.h>

namespace mica {

/// The matrix product y = f(a · b) for a (M, K) and b (K, N), where f is leaky_relu or the identity, by mica's own
/// kernels. matmul, which calls cuBLAS, is as fast or faster and more general; this op exists to be read and modified.
/// README.md beside this file explains it.
///
/// a and b have one floating dtype and device, any strides and any size, including 0; transposed operands are read
/// without a copy. y is row-major. On CUDA, products of 16-bit floats run on the tensor cores and are summed in float32
/// in a fixed order; the activation is applied before the only rounding.
///
/// Differentiable any number of times. The derivative of leaky_relu is computed from y, so at 0 it is 0.01.
///
/// Throws unless a and b are matrices with matching sizes, and for other activations.
Tensor tiled_matmul(const Tensor& a, const Tensor& b, Activation activation = Activation::none);

}  // namespace mica
