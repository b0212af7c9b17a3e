#pragma once

#include <optional>

#include <mica/ops/attention/attention.h>
#include <mica/ops/attention/detail/composed_attention.h>
#include <mica/ops/attention/detail/fused_attention_kernels.h>

namespace mica::detail {

/// A call of a fused kernel, with its results allocated.
struct FusedCall {
  AttentionBackend backend;
  kernels::FusedAttention args;
};

/// Whether the device can run the flash kernel for compute capability 9.0.
bool has_wgmma(Device device);

/// Prepares a call of `backend` for q (B, H, T, D), k and v (B, Hkv, S, D), and the mask if it is defined; nullopt if
/// the backend is not built in or does not support the problem. Operands with unaligned rows are copied.
std::optional<FusedCall> prepare_fused_attention(AttentionBackend backend, const Tensor& q, const Tensor& k,
                                                 const Tensor& v, const Tensor& mask, const AttentionRule& rule);

/// Runs the kernels on arguments that satisfy the conditions of prepare_fused_attention().
void run_fused_attention(const FusedCall& call);
void run_fused_attention_backward(AttentionBackend backend, const kernels::FusedAttentionBackward& args);

/// Runs the call as a recorded op. Returns (B, H, T, D), whose memory order is B, T, H, D.
Tensor fused_attention(FusedCall call, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRule& rule);

/// The same for q, k and v that are views of qkv (B, T, 3 · C): returns (B, T, C).
Tensor fused_self_attention(FusedCall call, const Tensor& qkv, const AttentionRule& rule);

}  // namespace mica::detail
