#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// The matrix product of the last two axes, y = a · b, by PyTorch's rules:
///
///   (…, M, K) · (…, K, N) → (…, M, N)   leading axes broadcast
///         (K) · (…, K, N) → (…, N)      a vector on the left is a row
///   (…, M, K) · (K)       → (…, M)      a vector on the right is a column
///         (K) · (K)       → ()
///
/// Both of one floating dtype on one device. Sums are kept in float32 for 16-bit floats, without TF32 for float32, and
/// rounded once. K = 0 gives zeros. Transposed operands are read where they lie; other strides cost a copy. On the CPU
/// an element of y depends on its row of a and its column of b only, bit by bit, not on the other rows nor on the
/// number of threads.
///
/// Throws for scalars, for inner sizes that differ and for leading axes that do not broadcast.
Tensor matmul(const Tensor& a, const Tensor& b);

/// y = x · weightᵀ + bias, for x (…, in), weight (out, in), bias (out) or undefined; y is (…, out).
///
/// One product over all leading axes of x; dtypes, devices and rounding as in matmul, the bias being part of the sum.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

}  // namespace mica
