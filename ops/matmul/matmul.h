#pragma once

#include <string>
#include <string_view>

#include <mica/core/tensor.h>

namespace mica {

/// The matrix product y = a · b over the last two axes, by PyTorch's rules:
///
///   (…, M, K) · (…, K, N) → (…, M, N)   leading axes broadcast
///         (K) · (…, K, N) → (…, N)      a vector on the left is a row
///   (…, M, K) · (K)       → (…, M)      a vector on the right is a column
///         (K) · (K)       → ()
///
/// a and b have the same numeric dtype and device, and any strides: transposed operands are read in place, others are
/// copied first. Products of integers wrap around, have a simple kernel, and are not differentiable. Products of 16-bit
/// floats are summed in float32 and rounded once; for float32, see set_float32_matmul_precision(). K = 0 gives
/// zeros. On the CPU, the bits of an element of y depend only on its row of a and its column of b, not on other rows or
/// on the number of threads. Differentiable any number of times.
///
/// Throws Error for scalars, if dtypes, devices or inner sizes (K) differ, or if leading axes do not broadcast.
Tensor matmul(const Tensor& a, const Tensor& b);

/// The activation of linear(): the function of the same name in ops/elementwise/unary.h. leaky_relu has a slope of
/// 0.01; gelu_tanh is gelu with GeluApproximation::tanh.
enum class Activation { none, relu, leaky_relu, gelu, gelu_tanh };

/// A linear layer: y = f(x · weightᵀ + bias), where f is the activation.
///
/// @param x       (…, in), floating.
/// @param weight  (out, in), of x's dtype and device. To use a matrix b (in, out), pass transpose(b, 0, 1); it is not
///                copied.
/// @param bias    (out), of x's dtype and device, or undefined: none.
/// @return (…, out), of x's dtype. Differentiable any number of times.
///
/// All leading axes of x are merged, so that this is one matrix product. Rounding is as in matmul(), with the bias as
/// part of the sum. Bias and activation are fused into the product where a kernel supports that: see README.md. Throws
/// Error before anything is computed if a shape, dtype or device does not match.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Activation activation = Activation::none);

/// Whether the device has instructions for bfloat16 products, so that these are faster than float32 products. True for
/// all GPUs, and for CPUs with AVX512-BF16 (twice as fast) or AMX-BF16 (16 times) if the operating system and the
/// compiler support these. The CPUs' instructions treat subnormal elements as zero. Throws if the device does not
/// exist.
bool has_fast_bfloat16(Device device);

/// The precision of float32 matrix products. Other dtypes and other ops are not affected.
///
/// ::tf32, on CUDA: tensor cores multiply operands rounded to 10 mantissa bits (relative errors of 5e-4 instead of
/// 6e-8) and sum in float32; that is several times as fast. The range of exponents is that of float32.
///
/// ::bfloat16x2, on CPUs with AMX: in linear layers of more than 8 rows, operands are rounded to the sum of two
/// bfloat16, which has 16 significant bits (relative errors of 4e-6), and products are summed in float32; that is twice
/// as fast. Infinite elements give NaN, and subnormal ones count as 0.
enum class MatmulPrecision { float32, tf32, bfloat16x2 };

/// Sets the precision for the whole program: for matmul, linear and all ops that use them, in forward and backward, on
/// every thread. The default is ::float32.
void set_float32_matmul_precision(MatmulPrecision precision);
MatmulPrecision float32_matmul_precision();

/// How the algorithm of cuBLASLt for a product on CUDA is chosen. The choice is made once for each combination of
/// shape, layout, dtype and epilogue.
///
/// ::heuristic takes the first result of cuBLASLt's heuristics. It depends on the product alone, so that every run of a
/// program gives the same bits.
///
/// ::timed measures the candidates of the heuristics, and variants of them, at the first use of a product, and takes
/// the fastest: some products take up to 20 % less time on an H200. Since this depends on measurements, another run may
/// choose another algorithm, which rounds differently. For reproducible bits, and to avoid a search of some seconds per
/// product, store matmul_algorithms() in a file and pass it to set_matmul_algorithms() in the next run. Nothing can be
/// measured while a CUDA graph is captured: products used there for the first time take the heuristics' choice.
enum class MatmulTuning { heuristic, timed };

/// Sets the way of choosing for the whole program. The default is ::heuristic.
void set_matmul_tuning(MatmulTuning tuning);
MatmulTuning matmul_tuning();

/// The algorithms that ::timed has chosen so far for a GPU, as lines of text; empty for the CPU.
std::string matmul_algorithms(Device device);
/// Restores the choices in a text from matmul_algorithms(), so that ::timed does not measure these products again.
/// Throws Error, and changes nothing, if `device` is no GPU, if the text is malformed, or if it comes from another
/// model of GPU or version of cuBLASLt.
void set_matmul_algorithms(std::string_view text, Device device);

}  // namespace mica
