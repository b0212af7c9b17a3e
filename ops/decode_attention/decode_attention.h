#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>

namespace mica {

/// The arguments of decode_attention(). B is the number of sequences, H that of query heads, Hkv that of key heads, D
/// the width of a head, and C the number of positions that fit into the cache. Tensors are on one device and of the
/// keys' dtype unless stated otherwise. Rows of q, k and v may have any stride; everything else is contiguous.
struct DecodeAttention {
  Tensor q{};                        ///< (B, H · D): the query of each sequence's new position
  Tensor k{}, v{};                   ///< (B, Hkv · D): its key and value
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
  /// one that computes q, k and v. The attention kernel then reads them while these are still being computed.
  bool ready_early = false;

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

}  // namespace mica
