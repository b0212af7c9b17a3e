#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// What tiled_matmul does to a sum before it rounds it.
enum class TiledActivation {
  none,
  leaky_relu,  // z where z > 0, 0.01 · z elsewhere
};

/// The matrix product y = activation(a · b) of a (M, K) and b (K, N), by kernels of mica's own. matmul, which calls
/// cuBLAS, is as fast or faster and does more; this one is there to be read, and to be changed. README.md beside this
/// file explains it.
///
/// a and b are of one floating dtype on one device, with any strides and any size, 0 included; transposed operands are
/// read where they lie. y is row-major. On CUDA, products of 16-bit floats run on the tensor cores and are summed in
/// float32 in a fixed order; the activation is applied before the only rounding.
///
/// Differentiable any number of times. The derivative of leaky_relu is taken from y, so at 0 it is 0.01.
///
/// Throws unless a and b are matrices that fit.
Tensor tiled_matmul(const Tensor& a, const Tensor& b, TiledActivation activation = TiledActivation::none);

}  // namespace mica
