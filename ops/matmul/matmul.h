#pragma once

#include <string>
#include <string_view>

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

/// Whether the device has instructions for products of bfloat16, so that they take less time than those of float32:
/// GPUs have; of CPUs those with AVX512-BF16 (twice the rate) or AMX-BF16 (16 times), where the operating system allows
/// their use and the compiler knew them. Their products count denormal elements as zero. Throws if there is no such
/// device.
bool has_fast_bfloat16(Device device);

/// How products of float32 on CUDA are computed. With ::tf32, tensor cores multiply operands that are rounded to 10
/// bits after the point (relative errors of 5e-4 instead of 6e-8) and sum in float32, several times as fast. The
/// exponent keeps its range. Other dtypes, other ops and the CPU do not change.
enum class MatmulPrecision { float32, tf32 };

/// Sets it for the whole program: matmul, linear and what is made of them, forward and backward, on every thread. It is
/// ::float32 at the start.
void set_float32_matmul_precision(MatmulPrecision precision);
MatmulPrecision float32_matmul_precision();

/// How cuBLASLt's algorithm for a product on CUDA is chosen, once for each shape, layout, dtype and epilogue.
///
/// ::heuristic takes the first that cuBLASLt's heuristics name. It depends on the product alone, so that every run of a
/// program gives the same bits. ::timed runs those that they name, and variants of them, when a product comes for the
/// first time, and takes the fastest: some products take up to 20 % less time on an H200. The choice depends on the
/// clock, and another run may choose otherwise and round otherwise. To repeat bits, and to spare the search of some
/// seconds a product, keep matmul_algorithms() in a file and give it to set_matmul_algorithms() in the next run.
///
/// While a stream is captured into a CUDA graph nothing can be timed, and products that were not timed before use the
/// heuristics.
enum class MatmulTuning { heuristic, timed };

/// Sets it for the whole program. It is ::heuristic at the start.
void set_matmul_tuning(MatmulTuning tuning);
MatmulTuning matmul_tuning();

/// The algorithms that were timed so far for a GPU, as lines of text; of the CPU, an empty one.
std::string matmul_algorithms(Device device);
/// Takes algorithms from such text; with ::timed, their products are not timed again. Throws Error if the text is
/// damaged, or made on another kind of GPU or by another version of cuBLASLt, and then changes nothing.
void set_matmul_algorithms(std::string_view text, Device device);

}  // namespace mica
