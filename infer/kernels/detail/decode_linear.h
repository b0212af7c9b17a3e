#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/decode_attention/decode_attention.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::infer {

// Text generation computes one new position per sequence at a time, without gradients. With so few rows, most of the
// time is spent reading weights. These functions read them fast. See infer/kernels/README.md.

/// The weight and bias of a linear layer. The weight is either `matrix` or `quantized`; the other one is undefined.
struct DecodeWeight {
  Tensor matrix{};              ///< (out, in), of x's dtype
  QuantizedWeight quantized{};  ///< (in, out)
  Tensor bias{};                ///< (out), of x's dtype; undefined: no bias

  bool is_quantized() const { return quantized.packed.defined(); }
  std::int64_t in() const { return matrix.defined() ? matrix.size(1) : quantized.rows; }
  std::int64_t out() const { return matrix.defined() ? matrix.size(0) : quantized.columns(); }
};

struct DecodeLinearOptions {
  Tensor norm_weight{};  ///< (in): multiply rms_norm(x, {in}, norm_weight, eps) instead of x; undefined: no norm
  double eps = 1e-6;     ///< of the norm
  bool swiglu = false;  ///< y = silu(x · w₀ᵀ + b₀) · (x · w₁ᵀ + b₁); needs two weights of the same shape
  Tensor residual{};    ///< of y's shape, added to y before y is rounded; undefined: none
};

/// Multiplies x (M, in), floating, with one to three weights (wᵢ, bᵢ) and concatenates the products along the columns:
///
///   y = [x · w₀ᵀ + b₀ | x · w₁ᵀ + b₁ | …] + residual
///
/// Returns y (M, out₀ + out₁ + …), or (M, out₀) with swiglu, of x's dtype.
///
/// On CUDA, a single kernel computes y if
/// - M ≤ 32 and x is float16 or bfloat16,
/// - weights are of x's dtype, or quantized to 4 or 8 bits in groups of 64 or more with scales and zeros of x's dtype,
/// - all sizes are multiples of 64, and
/// - for large floating weights and M > 8, x fits into shared memory.
///
/// The many rows of a prompt, with floating weights, take two kernels: the norm and the product (see
/// has_prompt_kernels()). Everything else is computed by a chain of other ops, which rounds intermediate results. A row
/// of y does not depend on the other rows, but may depend on M.
///
/// Throws Error before anything is computed if gradients are recorded (use autograd::NoGrad), or if a shape, dtype or
/// device does not match.
Tensor decode_linear(const Tensor& x, const std::vector<DecodeWeight>& weights,
                     const DecodeLinearOptions& options = {});

/// Whether there are kernels for the many rows of a prompt, of decode_append() and decode_linear(), for 16-bit floats:
/// on a GPU of compute capability 9.0.
bool has_prompt_kernels(Device device);

/// Prepares the attention of T new positions per sequence, such as a prompt: normalizes and rotates their queries and
/// keys, stores keys and values at the cache's indices `first` to `first` + T − 1, and returns the queries, (B, T, H,
/// D). The caller computes the attention itself.
///
/// `qkv` (B · T, (H + 2 Hkv) · D), contiguous, has queries, keys and values side by side, sequence by sequence; q, k, v
/// and `length` of `args` are not used. A sequence's padding does not count as positions: the first token after the
/// padding is rotated as position 0.
///
/// Throws Error for dtypes and GPUs without such a kernel (see has_prompt_kernels()), if gradients are recorded, if the
/// indices exceed the cache's capacity, or if a shape, dtype or device does not match.
Tensor decode_append(const Tensor& qkv, const DecodeAttention& args, std::int64_t first);

/// The cosine and sine of each rotary angle for the positions from `first` to `first` + `count` − 1, times `scale`, as
/// mica::rotary computes them: (count, D / 2, 2) float32. `frequencies` has D / 2 elements, `device` is a GPU.
Tensor decode_rotations(const std::vector<float>& frequencies, double scale, std::int64_t first, std::int64_t count,
                        Device device);

/// decode_append(decode_linear(x, weights, options), args, first), for the three weights of queries, keys and values,
/// in this order.
///
/// A single kernel computes product and append for the many rows of a prompt if heads are 64 wide and have no norms,
/// there is no padding, and there is either one sequence or a multiple of 64 positions. That kernel reads `rotations`,
/// which is decode_rotations() of the new positions.
Tensor decode_linear_append(const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options, const DecodeAttention& args, std::int64_t first,
                            const Tensor& rotations);

}  // namespace mica::infer
