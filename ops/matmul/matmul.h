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
/// Both of one floating dtype on one device. Sums are kept in float32 for 16-bit floats and rounded once; see
/// set_float32_matmul_precision for float32. K = 0 gives zeros. Transposed operands are read where they lie; other
/// strides cost a copy. On the CPU an element of y depends on its row of a and its column of b only, bit by bit, not on
/// the other rows nor on the number of threads.
///
/// Throws for scalars, for inner sizes that differ and for leading axes that do not broadcast.
Tensor matmul(const Tensor& a, const Tensor& b);

/// What linear() does to its sums; each is the function of that name in ops/elementwise/unary.h, leaky_relu with a
/// slope of 0.01. gelu is by erf, gelu_tanh by tanh.
enum class Activation { none, relu, leaky_relu, gelu, gelu_tanh };

/// y = f(x · weightᵀ + bias), f the activation; for x (…, in), weight (out, in) and bias (out) or undefined, y is
/// (…, out).
///
/// One product over all leading axes of x; dtypes, devices and rounding as in matmul, the bias being part of the sum.
/// Bias and activation cost no pass of their own where a kernel has them: README.md says where. A matrix (in, out) is a
/// weight as transpose(b, 0, 1), without a copy.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Activation activation = Activation::none);

/// How products of float32 on CUDA are computed. With ::tf32, tensor cores multiply operands that are rounded to 10
/// bits after the point (relative errors of 5e-4 instead of 6e-8) and sum in float32, several times as fast. The
/// exponent keeps its range. Other dtypes, other ops and the CPU do not change.
enum class MatmulPrecision { float32, tf32 };

/// Sets it for the whole program: matmul, linear and what is made of them, forward and backward, on every thread. It is
/// ::float32 at the start.
void set_float32_matmul_precision(MatmulPrecision precision);
MatmulPrecision float32_matmul_precision();

}  // namespace mica
