#include <algorithm>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/cuda/device.h>
#include <mica/core/dispatch.h>
#include <mica/ops/attention/detail/fused_attention.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::detail {

namespace {

struct BlockedKernels {
  static bool supports(Cpu, const kernels::FusedAttention& args) { return !args.mask.defined() && args.window == 0; }
  static void forward(Cpu device, const kernels::FusedAttention& args) {
    kernels::blocked_attention_forward(device, args);
  }
  static void backward(Cpu device, const kernels::FusedAttentionBackward& args) {
    kernels::blocked_attention_backward(device, args);
  }
};
struct FlashKernels {
  static bool supports(Cuda device, const kernels::FusedAttention& args) {
    return kernels::flash_attention_supports(device, args);
  }
  static void forward(Cuda device, const kernels::FusedAttention& args) {
    kernels::flash_attention_forward(device, args);
  }
  static void backward(Cuda device, const kernels::FusedAttentionBackward& args) {
    kernels::flash_attention_backward(device, args);
  }
};
struct CudnnKernels {
  static bool supports(Cuda device, const kernels::FusedAttention& args) {
    return kernels::cudnn_attention_supports(device, args);
  }
  static void forward(Cuda device, const kernels::FusedAttention& args) {
    kernels::cudnn_attention_forward(device, args);
  }
  static void backward(Cuda device, const kernels::FusedAttentionBackward& args) {
    kernels::cudnn_attention_backward(device, args);
  }
};

// Calls f with the kernels of `backend`; returns false if the device or the build has none.
template <class F>
bool with_kernels(AttentionBackend backend, Device device, F&& f) {
  bool found = false;
  on_device(device, [&]<class D>(D tag) {
    if constexpr (std::is_same_v<D, Cuda>) {
      if (backend == AttentionBackend::flash) {
        f(FlashKernels{}, tag);
        found = true;
      }
#if MICA_WITH_CUDNN
      if (backend == AttentionBackend::cudnn) {
        f(CudnnKernels{}, tag);
        found = true;
      }
#endif
    } else if (backend == AttentionBackend::blocked) {
      f(BlockedKernels{}, tag);
      found = true;
    }
  });
  return found;
}

// Whether rows are contiguous and, on CUDA, aligned to 16 bytes, as the kernels require.
bool has_aligned_rows(const Tensor& x) {
  if (x.device().is_cpu()) {
    return x.strides()[x.dim() - 1] == 1;
  }
  const std::int64_t step = 16 / static_cast<std::int64_t>(size_of(x.dtype()));
  bool aligned = x.strides()[x.dim() - 1] == 1 && reinterpret_cast<std::uintptr_t>(x.raw_data()) % 16 == 0;
  for (int axis = 0; axis < x.dim() - 1; ++axis) {
    aligned = aligned && (x.size(axis) == 1 || (x.strides()[axis] > 0 && x.strides()[axis] % step == 0));
  }
  return aligned;
}

// A new tensor (B, H, T, D) whose memory order is B, T, H, D.
Tensor empty_by_token(const Tensor& like, std::int64_t width) {
  const std::int64_t batch = like.size(0), heads = like.size(1), rows = like.size(2);
  const Tensor memory = empty({batch, rows, heads, width}, like.dtype(), like.device());
  return as_strided(memory, {batch, heads, rows, width}, {rows * heads * width, width, heads * width, 1}, 0);
}
Tensor empty_by_token(const Tensor& like) { return empty_by_token(like, like.size(3)); }

Tensor aligned(const Tensor& x) {
  if (has_aligned_rows(x)) {
    return x;
  }
  const Tensor copy = empty_by_token(x);
  copy_into(copy, x);
  return copy;
}

// The mask expanded to (B, H, T, S), without copies along broadcast axes, in a dtype that the kernels support.
Tensor prepared_mask(const Tensor& mask, const Tensor& q, const Tensor& k) {
  if (!mask.defined()) {
    return {};
  }
  const bool is_known = mask.dtype() == boolean || mask.dtype() == q.dtype();
  return broadcast_view(is_known ? mask : mask.to(float32), {q.size(0), q.size(1), q.size(2), k.size(2)});
}

kernels::FusedAttentionBackward backward_args(const AttentionRule& rule, const Tensor& q, const Tensor& k,
                                              const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& mask,
                                              const Tensor& dout) {
  return {.q = aligned(q),
          .k = aligned(k),
          .v = aligned(v),
          .out = out,
          .lse = lse,
          .dout = aligned(dout),
          .scale = rule.scale,
          .causal = rule.causal,
          .causal_offset = rule.causal_offset,
          .window = rule.window,
          .mask = mask,
          .dropout = rule.dropout};
}

struct FusedAttention {
  static constexpr bool composed = true;
  AttentionRule rule;
  FusedCall call;  // owns the tensors until forward has run

  Tensor forward(autograd::Context& ctx, const Tensor& q, const Tensor& k, const Tensor& v) {
    const kernels::FusedAttention args = std::exchange(call.args, {});
    run_fused_attention({call.backend, args});
    ctx.save_for_backward(q, k, v, args.out, args.lse, args.mask);
    return args.out;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [q, k, v, out, lse, mask] = ctx.saved<6>();
    if (autograd::grad_enabled()) {
      return composed_attention_gradients(q, k, v, mask, dy, rule);
    }
    kernels::FusedAttentionBackward args = backward_args(rule, q, k, v, out, lse, mask, dy);
    args.dq = empty_by_token(q);
    args.dk = empty_by_token(k);
    args.dv = empty_by_token(v);
    run_fused_attention_backward(call.backend, args);
    return {args.dq, args.dk, args.dv};
  }
};

// Views (B, T, C) as (B, H, T, D).
Tensor by_head(const Tensor& x, std::int64_t heads) {
  return transpose(reshape(x, {x.size(0), x.size(1), heads, x.size(2) / heads}), 1, 2);
}

std::array<Tensor, 3> parts_by_head(const Tensor& qkv, std::int64_t heads) {
  const std::int64_t width = qkv.size(2) / 3;
  std::array<Tensor, 3> parts;
  for (std::int64_t i = 0; i < 3; ++i) {
    parts[static_cast<std::size_t>(i)] = by_head(slice(qkv, 2, i * width, (i + 1) * width), heads);
  }
  return parts;
}

struct FusedSelfAttention {
  static constexpr bool composed = true;
  AttentionRule rule;
  std::int64_t heads;
  FusedCall call;

  Tensor forward(autograd::Context& ctx, const Tensor& qkv) {
    const kernels::FusedAttention args = std::exchange(call.args, {});
    run_fused_attention({call.backend, args});
    const std::int64_t rows = qkv.size(1), width = qkv.size(2) / 3;
    const Tensor y = as_strided(args.out, {qkv.size(0), rows, width}, {rows * width, width, 1}, 0);
    ctx.save_for_backward(qkv, y, args.lse, args.mask);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [qkv, y, lse, mask] = ctx.saved<4>();
    const auto [q, k, v] = parts_by_head(qkv, heads);
    if (autograd::grad_enabled()) {
      Tensors gradients = composed_attention_gradients(q, k, v, mask, by_head(dy, heads), rule);
      for (Tensor& gradient : gradients) {
        gradient = reshape(transpose(gradient, 1, 2), y.shape());
      }
      return {cat(gradients, 2)};
    }
    const Tensor dqkv = empty(qkv.shape(), qkv.dtype(), qkv.device());
    kernels::FusedAttentionBackward args =
        backward_args(rule, q, k, v, by_head(y, heads), lse, mask, by_head(contiguous_data(dy), heads));
    const auto [dq, dk, dv] = parts_by_head(dqkv, heads);
    args.dq = dq;
    args.dk = dk;
    args.dv = dv;
    run_fused_attention_backward(call.backend, args);
    return {dqkv};
  }
};

}  // namespace

bool has_wgmma(Device device) {
#if MICA_WITH_CUDA
  return device.is_cuda() && on_device(device, [](auto) { return cuda::device_has_wgmma(); });
#else
  return device.is_cuda();
#endif
}

void run_fused_attention(const FusedCall& call) {
  const bool found = with_kernels(call.backend, call.args.q.device(),
                                  [&](auto kernels, auto device) { kernels.forward(device, call.args); });
  check(found, "attention: this kernel was not built");
}

void run_fused_attention_backward(AttentionBackend backend, const kernels::FusedAttentionBackward& args) {
  const bool found =
      with_kernels(backend, args.q.device(), [&](auto kernels, auto device) { kernels.backward(device, args); });
  check(found, "attention: this kernel was not built");
}

std::optional<FusedCall> prepare_fused_attention(AttentionBackend backend, const Tensor& q, const Tensor& k,
                                                 const Tensor& v, const Tensor& mask, const AttentionRule& rule) {
  FusedCall call{backend,
                 {.q = aligned(q),
                  .k = aligned(k),
                  .v = aligned(v),
                  .out = empty_by_token(q, v.size(3)),
                  .lse = empty({q.size(0), q.size(1), q.size(2)}, q.dtype() == float64 ? float64 : float32, q.device()),
                  .scale = rule.scale,
                  .causal = rule.causal,
                  .causal_offset = rule.causal_offset,
                  .window = rule.window,
                  .mask = prepared_mask(mask, q, k),
                  .dropout = rule.dropout}};
  bool supported = false;
  with_kernels(backend, q.device(),
               [&](auto kernels, auto device) { supported = kernels.supports(device, call.args); });
  return supported ? std::optional(std::move(call)) : std::nullopt;
}

Tensor fused_attention(FusedCall call, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionRule& rule) {
  return autograd::apply(FusedAttention{rule, std::move(call)}, q, k, v);
}

Tensor fused_self_attention(FusedCall call, const Tensor& qkv, const AttentionRule& rule) {
  const std::int64_t heads = call.args.q.size(1);
  return autograd::apply(FusedSelfAttention{rule, heads, std::move(call)}, qkv);
}

}  // namespace mica::detail
