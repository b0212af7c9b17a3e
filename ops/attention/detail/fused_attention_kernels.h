#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/attention/detail/attention_dropout.h>

namespace mica::kernels {

/// out = softmax(scale · q kᵀ + mask) v in one kernel, with memory linear in T and S, and scores and softmax in
/// float32. All tensors have the same 16-bit floating dtype and device, and are not empty. Query head h reads key head
/// h / (H / Hkv). q, k, v and out may have any strides, but their last axis is contiguous and rows are aligned to 16
/// bytes.
struct FusedAttention {
  Tensor q;    ///< (B, H, T, D)
  Tensor k;    ///< (B, Hkv, S, D); Hkv divides H
  Tensor v;    ///< (B, Hkv, S, D)
  Tensor out;  ///< (B, H, T, D); its memory order is usually B, T, H, D
  Tensor lse;  ///< (B, H, T) float32, contiguous: the natural logarithm of the sum of exp(scale · scores) over the keys
               ///< that a query sees, -inf if it sees none; undefined if no backward follows
  double scale = 1;
  bool causal = false;             ///< query t sees only keys 0 to t + causal_offset
  std::int64_t causal_offset = 0;  ///< 0 aligns the first query with the first key, S - T the last with the last
  std::int64_t window = 0;         ///< if causal: query t sees only the last `window` of its keys; 0: all
  Tensor mask{};  ///< (B, H, T, S), any strides; boolean (true: the query sees the key), or float32 or of q's dtype
                  ///< (added to the scaled scores); undefined: no mask
  WeightDropout dropout{};  ///< applied to the weights before the product with v; lse includes dropped weights
};

/// The gradients of FusedAttention. Deterministic: bit-identical from run to run.
struct FusedAttentionBackward {
  Tensor q, k, v, out, lse, dout;  ///< as in FusedAttention; dout has out's shape
  Tensor dq{}, dk{}, dv{};         ///< of the shapes of q, k and v; may be slices of one (B, T, 3 · H · D) buffer
  double scale = 1;
  bool causal = false;
  std::int64_t causal_offset = 0;
  std::int64_t window = 0;
  Tensor mask{};
  WeightDropout dropout{};
};

/// The blocked implementation on the CPU. It supports every floating dtype; v and out may have another width than q and
/// k; lse has the accumulation dtype. Backward has one thread per batch item and key head.
void blocked_attention_forward(Cpu, const FusedAttention& args);
void blocked_attention_backward(Cpu, const FusedAttentionBackward& args);

/// Whether an implementation supports a problem. It depends only on shapes, strides, dtype and options, on the GPU and
/// on the build.
bool flash_attention_supports(Cuda, const FusedAttention& problem);
void flash_attention_forward(Cuda, const FusedAttention& args);
void flash_attention_backward(Cuda, const FusedAttentionBackward& args);

bool cudnn_attention_supports(Cuda, const FusedAttention& problem);
void cudnn_attention_forward(Cuda, const FusedAttention& args);
void cudnn_attention_backward(Cuda, const FusedAttentionBackward& args);

}  // namespace mica::kernels
