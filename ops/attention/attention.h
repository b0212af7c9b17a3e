#pragma once

#include <cstdint>
#include <optional>

#include <mica/core/tensor.h>

namespace mica {

/// The implementation of attention. All of them compute scores and softmax in float32 (float64 for float64), and their
/// results differ only by rounding.
enum class AttentionBackend {
  automatic,  ///< the fastest one that supports the shapes, dtype, device and options
  composed,   ///< matrix products and a softmax; stores the weights (B, H, T, S) in float32; supports everything
  blocked,    ///< CPU: one pass over blocks of keys
  flash,      ///< CUDA, 16-bit floats: one kernel on tensor cores
  cudnn,      ///< CUDA, 16-bit floats: cuDNN's kernel, if cuDNN was found when mica was built
};

struct AttentionOptions {
  bool causal = false;  ///< query t sees only keys 0 to t + causal_offset
  /// 0 aligns the first query with the first key, like PyTorch's is_causal; S − T aligns the last query with the last
  /// key, as needed if S − T keys come from a cache. In [−T, max(S, T)].
  std::int64_t causal_offset = 0;
  /// With `causal`: query t sees only the last `window` of these keys, itself included. 0: all. Without cuDNN's kernel,
  /// queries are processed in blocks, each with the keys that it may see, so time and memory grow with T · window.
  std::int64_t window = 0;
  std::optional<double> scale{};  ///< multiplies the scores; 1/√D unless given
  /// Bounds the scaled scores s, before the mask: cap · tanh(s / cap), as in Gemma 2. 0: no cap. Composed only.
  double cap = 0;
  /// The probability that a weight is dropped, in [0, 1). It is rounded to a multiple of 1/256, of at least one unless
  /// it is 0. Leave it at 0 outside of training. Which weights are dropped depends on the random key and on their
  /// positions, not on the backend or the device.
  double dropout = 0;
  /// Broadcasts to (B, H, T, S). Boolean: true where the query sees the key. Floating: added to the scaled scores;
  /// differentiable.
  Tensor mask{};
  /// Any value but `automatic` throws if that implementation does not support the shapes, dtype, device or options.
  AttentionBackend backend = AttentionBackend::automatic;
};

/// Attention: y = dropout(softmax(scale · q · kᵀ + mask)) · v. A query that sees no key gives zeros.
///
/// @param q  (B, H, T, D), floating.
/// @param k  (B, Hkv, S, D), of q's dtype and device. Hkv divides H: query head h reads key head h / (H / Hkv), as in
///           grouped-query attention.
/// @param v  (B, Hkv, S, Dv), of q's dtype and device.
/// @return (B, H, T, Dv), of q's dtype. Differentiable any number of times in q, k, v and a floating mask.
///
/// In place of B there may be any number of leading axes, equal in all three tensors. Matrices (T, D), (S, D) and
/// (S, Dv) are a single head.
///
/// For 16-bit floats, scores, softmax and sums are in float32, and the result is rounded once. Where possible, a single
/// kernel computes everything and needs memory linear in T and S: see AttentionBackend and detail/attention_plan.h.
/// Second derivatives are computed by the composed implementation.
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not match.
///
/// Vaswani et al., Attention Is All You Need, 2017; Dao et al., FlashAttention, 2022; Ainslie et al., GQA, 2023.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options = {});

/// scaled_dot_product_attention() for queries, keys and values that one linear layer computed: qkv (B, T, 3 · C) is
/// [q | k | v], each of them C = heads · D columns, head by head. Returns (B, T, C), again head by head. With a fused
/// kernel, nothing is copied to split qkv or to join the heads, and backward writes the gradients of q, k and v into
/// one (B, T, 3 · C).
Tensor self_attention(const Tensor& qkv, std::int64_t heads, const AttentionOptions& options = {});

/// A mask for rows that hold several documents, so that each attends to itself only. `documents` (B, T), an integer
/// dtype, has the document's number at each position. Returns a boolean (B, 1, T, T), true where query and key belong
/// to the same document. Combine it with AttentionOptions::causal as needed.
Tensor document_mask(const Tensor& documents);

}  // namespace mica
