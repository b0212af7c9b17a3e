#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/quantized/quantized.h>

namespace mica {

// A decoder's step of one new position per sequence, for autograd::NoGrad: few rows, so that its time is that of
// reading weights, keys and values. See README.md beside this file.

/// The weight of a linear layer: floating (out, in), or quantized (in, out).
struct DecodeWeight {
  Tensor matrix{};
  QuantizedWeight quantized{};  ///< used if its tensors are defined
  Tensor bias{};                ///< (out), or undefined: 0

  std::int64_t in() const { return matrix.defined() ? matrix.size(1) : quantized.rows; }
  std::int64_t out() const { return matrix.defined() ? matrix.size(0) : quantized.columns(); }
};

struct DecodeLinearOptions {
  Tensor norm_weight{};  ///< (in): x is rms_norm(x, {in}, norm_weight, eps) first
  double eps = 1e-6;
  bool swiglu = false;  ///< of two weights: silu(x · w₀ᵀ + b₀) · (x · w₁ᵀ + b₁)
  Tensor residual{};    ///< of y's shape, added to y before it is rounded
};

/// The products of x (M, in) with one to three weights, side by side: y (M, out₀ + out₁ + …), or (M, out₀) with swiglu.
///
/// One kernel on CUDA for float16 and bfloat16, M ≤ 32, weights of those dtypes or quantized to 4 or 8 bits in groups
/// of 64 or more with scales and zeros of x's dtype, and sizes that are multiples of 64; by other ops elsewhere, and
/// for large weights and M > 8 if x does not fit into shared memory, which round more often. For a prompt's many rows
/// and floating weights, likewise one kernel after the norm (has_prompt_kernels()). A row of y does not depend on other
/// rows, but on M it may.
///
/// No gradients: throws while they are recorded. Throws Error before anything is computed if a shape, dtype or device
/// does not match.
Tensor decode_linear(const Tensor& x, const std::vector<DecodeWeight>& weights,
                     const DecodeLinearOptions& options = {});

/// The attention of one new position per sequence to itself and the cached ones before it. With D the head width:
struct DecodeAttention {
  Tensor qkv{};                      ///< (B, (H + 2 Hkv) · D): queries, keys and values of the new position
  std::int64_t heads = 1;            ///< H, a multiple of the cache's Hkv
  Tensor q_norm{}, k_norm{};         ///< (D): the RMS norm's weights of each head's query and key; undefined: no norm
  double eps = 1e-6;                 ///< of both norms
  std::vector<float> frequencies{};  ///< D / 2, of mica::rotary; empty: no rotation
  double rotary_scale = 1;
  Tensor keys{}, values{};  ///< the cache, (B, Hkv, C, D); the new position's are written into it
  Tensor length{};          ///< (1) int64 on the device: how many positions were cached before
  Tensor padding{};         ///< (B) int64: the first so many positions are padding; undefined: none
  /// Whether the length, the padding and the cached positions were written before the kernel in front of the one that
  /// computes qkv. They are then read while qkv is computed.
  bool settled = false;

  std::int64_t key_heads() const { return keys.size(1); }
  std::int64_t width() const { return keys.size(3); }
};

/// Whether decode_attention() supports keys of that dtype: on CUDA, widths of 32, 64, 128 and, for 16-bit floats, 256;
/// not float64.
bool has_decode_attention(DType dtype, std::int64_t width, Device device);

/// Normalizes and rotates queries and keys, appends keys and values to the cache and returns attention's result,
/// (B, H · D). Position p is in slot p mod C of the cache, so attention sees the last C positions, the new one
/// included.
///
/// The length is read on the device, so a captured call continues from where the replay before has ended if the step
/// increments the length. Sums are in float32, split over the keys among up to eight blocks per key head (compute
/// capability 9.0), in an order that depends on the length and the numbers of sequences and heads alone. In 16 bits,
/// the weights of the cached values are rounded, as in flash attention.
///
/// Throws Error if has_decode_attention() is false or a shape, dtype or device does not match.
Tensor decode_attention(const DecodeAttention& args);

/// Whether decode_append() and decode_linear() of many rows have kernels for that dtype: 16-bit floats on a GPU of
/// compute capability 9.0, head widths of 32, 64, 128 and 256.
bool has_prompt_kernels(DType dtype, std::int64_t width, Device device);

/// The step before the attention of T new positions per sequence: normalizes and rotates their queries and keys, writes
/// keys and values into the cache's slots from `first` on, and returns the queries, (B, T, H, D). Of `args`, qkv has B
/// · T rows, and the length is not used: positions count from `first`, without the padding.
///
/// Throws Error if has_prompt_kernels() is false, if the slots are not in the cache, or a shape, dtype or device does
/// not match.
Tensor decode_append(const DecodeAttention& args, std::int64_t first);

/// Cosines and sines of the angles of the positions from `first` to `first` + `count` − 1 on CUDA, (count, D / 2, 2)
/// float32, as mica::rotary computes them.
Tensor decode_rotations(const std::vector<float>& frequencies, double scale, std::int64_t first, std::int64_t count,
                        Device device);

/// decode_append() of qkv = decode_linear(x, weights, options), with weights of queries, keys and values; `args`
/// without qkv. One kernel for a prompt's rows and heads of 64 columns if these have no norms, there is no padding, and
/// one sequence or a multiple of 64 positions. `rotations`: decode_rotations() of the new positions, for that kernel.
Tensor decode_linear_append(const Tensor& x, const std::vector<DecodeWeight>& weights,
                            const DecodeLinearOptions& options, DecodeAttention args, std::int64_t first,
                            const Tensor& rotations);

}  // namespace mica
