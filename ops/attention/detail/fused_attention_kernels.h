#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/attention/detail/attention_dropout.h>

namespace mica::kernels {

/// out = softmax(scale · q kᵀ + mask) v in one kernel: memory linear in T and S, scores and softmax in float32.
/// All of one 16-bit floating dtype on one device, none empty. Query head h reads key head h / (H / Hkv).
struct FusedAttention {
  Tensor q;    ///< (B, H, T, D), any strides, last axis dense, rows 16-byte aligned
  Tensor k;    ///< (B, Hkv, S, D) likewise; Hkv divides H
  Tensor v;    ///< (B, Hkv, S, D) likewise
  Tensor out;  ///< (B, H, T, D) likewise; usually in memory order B, T, H, D
  Tensor lse;  ///< (B, H, T) float32, contiguous: natural log of the sum of exp(scale · scores) over
               ///< the visible keys, -inf without any; undefined if no backward follows
  double scale = 1;
  bool causal = false;             ///< query t sees keys up to t + causal_offset
  std::int64_t causal_offset = 0;  ///< 0 aligns the first query with the first key, S - T the last with the last
  Tensor mask{};            ///< (B, H, T, S), any strides, boolean (true: seen), float32 or of q's dtype (added to
                            ///< the scaled scores); undefined for none
  WeightDropout dropout{};  ///< of the weights, before the product with v; lse and sums are those of all
};

/// The gradients of FusedAttention. Deterministic: bit-identical from run to run.
struct FusedAttentionBackward {
  Tensor q, k, v, out, lse, dout;  ///< as in the forward; dout (B, H, T, D)
  Tensor dq{}, dk{}, dv{};         ///< strided like q, k, v: may be slices of one (B, T, 3 · H · D) buffer
  double scale = 1;
  bool causal = false;
  std::int64_t causal_offset = 0;
  Tensor mask{};
  WeightDropout dropout{};
};

/// On the CPU, for every floating dtype; v and out may have another last axis than q and k; lse has the accumulation
/// dtype. Backward has one thread per batch item and key head.
void blocked_attention_forward(Cpu, const FusedAttention& args);
void blocked_attention_backward(Cpu, const FusedAttentionBackward& args);

/// Whether an implementation supports a problem: a pure function of shapes, strides, dtype and options, and of the GPU
/// and the build.
bool flash_attention_supports(Cuda, const FusedAttention& problem);
void flash_attention_forward(Cuda, const FusedAttention& args);
void flash_attention_backward(Cuda, const FusedAttentionBackward& args);

bool cudnn_attention_supports(Cuda, const FusedAttention& problem);
void cudnn_attention_forward(Cuda, const FusedAttention& args);
void cudnn_attention_backward(Cuda, const FusedAttentionBackward& args);

}  // namespace mica::kernels
