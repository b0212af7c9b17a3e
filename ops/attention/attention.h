#pragma once

#include <cstdint>
#include <optional>

#include <mica/core/tensor.h>

namespace mica {

/// The implementation of attention. All compute scores and softmax in float32 (float64 for float64) and agree within
/// the rounding of their results.
enum class AttentionBackend {
  automatic,  ///< the fastest that takes the problem, by its shape, dtype, device and options
  composed,   ///< products and a softmax; keeps the weights (B, H, T, S) in float32; takes everything
  blocked,    ///< CPU: one pass over blocks of keys
  flash,      ///< CUDA, 16-bit floats: one kernel on tensor cores
  cudnn,      ///< CUDA, 16-bit floats: cuDNN's kernel, if it was found when mica was built
};

struct AttentionOptions {
  bool causal = false;  ///< query t sees keys up to t + causal_offset only
  /// 0 aligns the first query with the first key, like PyTorch's is_causal; S − T aligns the last query with the last
  /// key, for queries that continue S − T cached keys.
  std::int64_t causal_offset = 0;
  std::optional<double> scale{};  ///< of the scores; 1/√D unless given
  /// Fraction of the weights to drop, rounded to a multiple of 1/256 (to 0 only if it is 0); leave it at 0 outside of
  /// training. The choice depends on the random key and the weights' positions, not on the backend or the device.
  double dropout = 0;
  /// Broadcasts to (B, H, T, S). Boolean: true keys are visible. Floating: added to the scaled scores;
  /// differentiable.
  Tensor mask{};
  /// Any value but `automatic` throws if that implementation does not support the problem.
  AttentionBackend backend = AttentionBackend::automatic;
};

/// Attention: y = dropout(softmax(scale · q · kᵀ + mask)) · v. A row without visible keys gives zeros.
///
/// q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) of one floating dtype on one device. Hkv divides H: query head h
/// reads key head h / (H / Hkv) (grouped queries). Any number of leading axes before H, equal in all three, or none:
/// (T, D) is one head. Returns (B, H, T, Dv).
///
/// Scores, softmax and sums are in float32 for 16-bit floats, and the result is rounded once. Where available, a single
/// kernel computes everything, with memory linear in T and S: see AttentionBackend and attention_plan.h. Second
/// derivatives use the composed path.
///
/// Vaswani et al., Attention Is All You Need, 2017; Dao et al., FlashAttention, 2022; Ainslie et al., GQA, 2023.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options = {});

/// The same for queries, keys and values from one product: qkv (B, T, 3 · C) has q, k and v side by side, each of C =
/// heads · D columns. Returns (B, T, C), the heads side by side. With a fused kernel, inputs and outputs are not
/// copied, and backward writes the three gradients into one (B, T, 3 · C).
Tensor self_attention(const Tensor& qkv, std::int64_t heads, const AttentionOptions& options = {});

/// A mask for attention within the documents that share a row: documents (B, T), integers, to a boolean (B, 1, T, T),
/// true where query and key have the same number. Options.causal adds to it.
Tensor document_mask(const Tensor& documents);

}  // namespace mica
