#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/quantized/quantized.h>

namespace mica {

// Text generation computes one new position per sequence at a time, without gradients. With so few rows, most of the
// time is spent reading weights, keys and values. These ops read them fast. See README.md beside this file.

/// The weight and bias of a linear layer. The weight is either `matrix` or `quantized`; the other one is undefined.
struct DecodeWeight {
  Tensor matrix{};              ///< (out, in), of x's dtype
  QuantizedWeight quantized{};  ///< (in, out)
  Tensor bias{};                ///< (out), of x's dtype; undefined: no bias

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

/// The arguments of decode_attention(). B is the number of sequences, H that of query heads, Hkv that of key heads, D
/// the width of a head, and C the number of positions that fit into the cache. Tensors are contiguous, on one device,
/// and of the keys' dtype unless stated otherwise.
struct DecodeAttention {
  Tensor qkv{};                      ///< (B, (H + 2 Hkv) · D): query, key and value of each sequence's new position
  std::int64_t heads = 1;            ///< H, a multiple of Hkv
  Tensor q_norm{}, k_norm{};         ///< (D): weights of an RMS norm of each head's query and key; undefined: no norm
  double eps = 1e-6;                 ///< of both norms
  std::vector<float> frequencies{};  ///< D / 2 of them, as in mica::rotary; empty: no rotation
  double rotary_scale = 1;           ///< RotaryOptions::scale
  Tensor keys{}, values{};           ///< the cache, (B, Hkv, C, D); the new key and value are written into it
  Tensor length{};                   ///< (1) int64: how many positions are already in the cache
  Tensor padding{};                  ///< (B) int64: how many positions at the sequence's start are padding, which
                                     ///< attention ignores; undefined: none
  /// Set this only if `length`, `padding` and the cached positions were complete before the kernel that precedes the
  /// one that computes qkv. The attention kernel then reads them while qkv is still being computed.
  bool settled = false;

  std::int64_t key_heads() const { return keys.size(1); }
  std::int64_t width() const { return keys.size(3); }
};

/// Whether decode_attention() supports keys of that dtype: on CUDA, widths of 32, 64, 128 and, for 16-bit floats, 256;
/// not float64.
bool has_decode_attention(DType dtype, std::int64_t width, Device device);

/// The attention of one new position per sequence to itself and to the cached positions before it: normalizes and
/// rotates query and key, appends key and value to the cache, and returns the attention's result, (B, H · D), of the
/// keys' dtype. Position p is stored in slot p mod C of the cache, so attention sees the last C positions, including
/// the new one.
///
/// The kernel reads `length` on the device. So a captured CUDA graph that also increments it appends at the next
/// position in each replay. Sums are in float32. Up to eight thread blocks per key head share the keys (on compute
/// capability 9.0); the order of the sums depends only on the length and the numbers of sequences and heads. For 16-bit
/// dtypes, attention weights are rounded before they multiply the cached values, as in flash attention.
///
/// Throws Error if has_decode_attention() is false, if gradients are recorded, or if a shape, dtype or device does not
/// match.
Tensor decode_attention(const DecodeAttention& args);

/// Whether there are kernels for the many rows of a prompt, of decode_append() and decode_linear(): for 16-bit floats
/// and head widths of 32, 64, 128 and 256, on a GPU of compute capability 9.0.
bool has_prompt_kernels(DType dtype, std::int64_t width, Device device);

/// Prepares the attention of T new positions per sequence, such as a prompt: normalizes and rotates their queries and
/// keys, writes keys and values into the cache's slots `first` to `first` + T − 1, and returns the queries, (B, T, H,
/// D). The caller computes the attention itself.
///
/// In `args`, qkv has B · T rows, sequence by sequence, and `length` is not used. A sequence's padding does not count
/// as positions: the first token after the padding is rotated as position 0.
///
/// Throws Error if has_prompt_kernels() is false, if gradients are recorded, if the slots are not in the cache, or if a
/// shape, dtype or device does not match.
Tensor decode_append(const DecodeAttention& args, std::int64_t first);

/// The cosine and sine of each rotary angle for the positions from `first` to `first` + `count` − 1, times `scale`, as
/// mica::rotary computes them: (count, D / 2, 2) float32. `frequencies` has D / 2 elements, `device` is a GPU.
Tensor decode_rotations(const std::vector<float>& frequencies, double scale, std::int64_t first, std::int64_t count,
                        Device device);

/// decode_append(args, first) with args.qkv = decode_linear(x, weights, options), for the three weights of queries,
/// keys and values, in this order. The caller leaves args.qkv undefined.
///
/// A single kernel computes product and append for the many rows of a prompt if heads are 64 wide and have no norms,
/// there is no padding, and there is either one sequence or a multiple of 64 positions. That kernel reads `rotations`,
/// which is decode_rotations() of the new positions.
Tensor decode_linear_append(const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options, DecodeAttention args, std::int64_t first,
                            const Tensor& rotations);

}  // namespace mica
