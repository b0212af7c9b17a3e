#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/matmul/matmul.h>

namespace mica {

/// The matrix product y = f(a · b) for a (M, K) and b (K, N), where f is leaky_relu or the identity, by mica's own
/// kernels. matmul() calls cuBLAS, is as fast or faster, and more general; this op exists to be read and modified.
/// README.md beside this file explains it.
///
/// a and b have the same floating dtype and device, and any strides and sizes, including 0; transposed operands are
/// read in place. y (M, N) is row-major. On CUDA, products of 16-bit floats are computed by tensor cores and summed in
/// float32 in a fixed order; the result is rounded once, after the activation.
///
/// Differentiable any number of times. The derivative of leaky_relu at 0 is 0.01, since it is computed from y.
///
/// Throws Error unless a and b are matrices whose sizes, dtypes and devices match, and for other activations.
Tensor tiled_matmul(const Tensor& a, const Tensor& b, Activation activation = Activation::none);

}  // namespace mica
