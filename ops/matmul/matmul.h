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
/// set_float32_matmul_precision for float32. K = 0 gives zeros. Transposed operands are read in place; other strides
/// cost a copy. On the CPU the bits of an element of y depend only on its row of a and its column of b, not on other
/// rows or the number of threads.
///
/// Throws for scalars, for inner sizes that differ and for leading axes that do not broadcast.
Tensor matmul(const Tensor& a, const Tensor& b);

/// The activation of linear(): the function of that name in ops/elementwise/unary.h, leaky_relu with a slope of 0.01.
/// gelu uses erf, gelu_tanh tanh.
enum class Activation { none, relu, leaky_relu, gelu, gelu_tanh };

/// y = f(x · weightᵀ + bias), f the activation; for x (…, in), weight (out, in) and bias (out) or undefined, y is
/// (…, out).
///
/// One product over all leading axes of x; dtypes, devices and rounding as in matmul, with the bias as part of the sum.
/// Bias and activation are fused where a kernel supports them: see README.md. To use a matrix b (in, out) as a weight,
/// pass transpose(b, 0, 1), without a copy.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Activation activation = Activation::none);

/// Whether the device has instructions for bfloat16 products, which are then faster than float32 products:
/// all GPUs, and CPUs with AVX512-BF16 (twice the rate) or AMX-BF16 (16 times), if the operating system and
/// the compiler support them. These products treat denormal elements as zero. Throws if there is no such
/// device.
bool has_fast_bfloat16(Device device);

/// The precision of float32 products on CUDA. With ::tf32, tensor cores multiply operands rounded to 10 mantissa bits
/// (relative errors of 5e-4 instead of 6e-8) and sum in float32, several times as fast. The exponent range is the same.
/// Other dtypes, other ops and the CPU are not affected.
enum class MatmulPrecision { float32, tf32 };

/// Sets it for the whole program: matmul, linear and all ops that use them, forward and backward, on every thread. The
/// default is ::float32.
void set_float32_matmul_precision(MatmulPrecision precision);
MatmulPrecision float32_matmul_precision();

/// The choice of cuBLASLt's algorithm for a product on CUDA, made once per shape, layout, dtype and epilogue.
///
/// ::heuristic uses the first choice of cuBLASLt's heuristics. It depends on the product alone, so that every run of a
/// program gives the same bits. ::timed times the heuristics' candidates and variants of them at the first use of a
/// product and selects the fastest: some products take up to 20 % less time on an H200. The choice depends on
/// measurements, so another run may choose and round differently. For reproducible bits, and to save the search of some
/// seconds per product, store matmul_algorithms() in a file and pass it to set_matmul_algorithms() in the next run.
///
/// During the capture of a CUDA graph nothing can be timed, and products not timed before use the
/// heuristics.
enum class MatmulTuning { heuristic, timed };

/// Sets it for the whole program. The default is ::heuristic.
void set_matmul_tuning(MatmulTuning tuning);
MatmulTuning matmul_tuning();

/// The algorithms timed so far for a GPU, as lines of text; empty for the CPU.
std::string matmul_algorithms(Device device);
/// Restores algorithms from such text; with ::timed, their products are not timed again. Throws Error, without any
/// change, if the text is malformed, or comes from another kind of GPU or version of cuBLASLt.
void set_matmul_algorithms(std::string_view text, Device device);

}  // namespace mica
