#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/matmul/matmul.h>

namespace mica {

/// The matrix product y = f(a · b) of a (M, K) and b (K, N), f being leaky_relu or nothing, by kernels of mica's own.
/// matmul, which calls cuBLAS, is as fast or faster and does more; this one is there to be read, and to be changed.
/// README.md beside this file explains it.
///
/// a and b are of one floating dtype on one device, with any strides and any size, 0 included; transposed operands are
/// read where they lie. y is row-major. On CUDA, products of 16-bit floats run on the tensor cores and are summed in
/// float32 in a fixed order; the activation is applied before the only rounding.
///
/// Differentiable any number of times. The derivative of leaky_relu is taken from y, so at 0 it is 0.01.
///
/// Throws unless a and b are matrices that fit, and for other activations.
Tensor tiled_matmul(const Tensor& a, const Tensor& b, Activation activation = Activation::none);

}  // namespace mica
