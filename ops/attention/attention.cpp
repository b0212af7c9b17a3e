#include <algorithm>
#include <cmath>
#include <limits>

#include <mica/autograd/autocast.h>
#include <mica/autograd/grad_mode.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/attention/detail/attention_plan.h>
#include <mica/ops/attention/detail/composed_attention.h>
#include <mica/ops/attention/detail/fused_attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

const char* name_of(AttentionBackend backend) {
  switch (backend) {
    case AttentionBackend::automatic: return "automatic";
    case AttentionBackend::composed: return "composed";
    case AttentionBackend::blocked: return "blocked";
    case AttentionBackend::flash: return "flash";
    case AttentionBackend::cudnn: return "cudnn";
  }
  return "unknown";
}

void check_options(const char* name, const Tensor& q, const Tensor& k, const AttentionOptions& options) {
  check(options.dropout >= 0 && options.dropout < 1, "{}: expected dropout in [0, 1), got {}", name, options.dropout);
  check(options.cap >= 0 && std::isfinite(options.cap), "{}: expected a finite cap >= 0, got {}", name, options.cap);
  const std::int64_t queries = q.size(-2), keys = k.size(-2);
  check(options.causal_offset >= -queries && options.causal_offset <= std::max(keys, queries),
        "{}: expected causal_offset in [{}, {}] for {} queries and {} keys, got {}", name, -queries,
        std::max(keys, queries), queries, keys, options.causal_offset);
  check(options.window >= 0 && (options.window == 0 || options.causal),
        "{}: expected a window >= 0, and with a window `causal`, got {} and {}", name, options.window, options.causal);
  const Tensor& mask = options.mask;
  if (!mask.defined()) {
    return;
  }
  check(mask.dtype() == boolean || is_floating(mask.dtype()), "{}: expected a boolean or floating mask, got {}", name,
        mask.dtype());
  check(mask.device() == q.device(), "{}: expected the mask on {}, got it on {}", name, q.device(), mask.device());
  Shape scores = q.shape();
  scores[scores.size() - 1] = keys;
  bool broadcasts = mask.dim() <= scores.size();
  for (int axis = 1; broadcasts && axis <= mask.dim(); ++axis) {
    broadcasts = mask.size(-axis) == 1 || mask.size(-axis) == scores[scores.size() - axis];
  }
  check(broadcasts, "{}: expected a mask that broadcasts to the scores' shape {}, got {}", name, scores, mask.shape());
}

void check_operands(const char* name, const Tensor& q, const Tensor& k, const Tensor& v) {
  const int rank = q.dim();
  check(rank >= 2 && k.dim() == rank && v.dim() == rank,
        "{}: expected q, k and v of shapes (B, H, T, D), (B, Hkv, S, D) and (B, Hkv, S, Dv), got {}, {} and {}", name,
        q.shape(), k.shape(), v.shape());
  const int batch_axes = std::max(rank - 3, 0);
  check(k.shape().slice(0, batch_axes) == q.shape().slice(0, batch_axes) &&
            v.shape().slice(0, rank - 2) == k.shape().slice(0, rank - 2),
        "{}: expected q, k and v with equal leading axes, got {}, {} and {}", name, q.shape(), k.shape(), v.shape());
  if (rank >= 3) {
    const std::int64_t heads = q.size(-3), key_heads = k.size(-3);
    check(heads == key_heads || (key_heads > 0 && heads % key_heads == 0),
          "{}: expected k and v with heads that divide the {} of q, got {}, {} and {}", name, heads, q.shape(),
          k.shape(), v.shape());
  }
  check(k.size(-1) == q.size(-1), "{}: expected k with a last axis of {}, as in q, got {}", name, q.size(-1),
        k.shape());
  check(v.size(-2) == k.size(-2), "{}: expected v with {} rows, as in k, got {}", name, k.size(-2), v.shape());
  check(is_floating(q.dtype()) && k.dtype() == q.dtype() && v.dtype() == q.dtype(),
        "{}: expected one floating dtype, got {}, {} and {}", name, q.dtype(), k.dtype(), v.dtype());
  check(k.device() == q.device() && v.device() == q.device(), "{}: expected one device, got {}, {} and {}", name,
        q.device(), k.device(), v.device());
}

detail::AttentionRule rule_of(const Tensor& q, const AttentionOptions& options) {
  const bool all_in_window = q.size(-2) + options.causal_offset <= options.window;
  const double width = static_cast<double>(std::max<std::int64_t>(q.size(-1), 1));
  return {.scale = options.scale.value_or(1 / std::sqrt(width)),
          .cap = options.cap,
          .causal = options.causal,
          .causal_offset = options.causal ? options.causal_offset : 0,
          .window = all_in_window ? 0 : options.window,
          .dropout = options.dropout > 0
                         ? WeightDropout{next_philox_key(), WeightDropout::threshold_of(options.dropout)}
                         : WeightDropout{}};
}

// The fused kernel to use; nullopt if attention is composed of other ops.
std::optional<detail::FusedCall> choose(const char* name, const Tensor& q, const Tensor& k, const Tensor& v,
                                        const AttentionOptions& options, const detail::AttentionRule& rule) {
  const AttentionProblem problem{
      .cuda = q.device().is_cuda(),
      .wgmma = detail::has_wgmma(q.device()),
      .dtype = q.dtype(),
      .rank = q.dim(),
      .items = q.dim() == 4 ? q.size(0) * q.size(1) : 0,
      .key_items = k.dim() == 4 ? k.size(0) * k.size(1) : 0,
      .queries = q.size(-2),
      .keys = k.size(-2),
      .width = q.size(-1),
      .value_width = v.size(-1),
      .masked = options.mask.defined(),
      .mask_gradient = options.mask.defined() && autograd::grad_enabled() && options.mask.requires_grad(),
      .windowed = rule.window > 0,
      .drops = options.dropout > 0,
      .capped = options.cap > 0,
      .empty = q.numel() == 0 || k.numel() == 0 || v.numel() == 0};
  for (const AttentionBackend backend : plan_attention(problem)) {
    if (options.backend != AttentionBackend::automatic && options.backend != backend) {
      continue;
    }
    if (backend == AttentionBackend::composed) {
      return std::nullopt;
    }
    if (std::optional<detail::FusedCall> call = detail::prepare_fused_attention(backend, q, k, v, options.mask, rule)) {
      return call;
    }
  }
  if (rule.window > 0) {
    return std::nullopt;  // each block of queries requires the backend
  }
  fail("{}: the {} backend does not support q {}, k {} and v {} of {} on {} with these options", name,
       name_of(options.backend), q.shape(), k.shape(), v.shape(), q.dtype(), q.device());
}

// Rows [t0, t1) and columns [s0, s1) of a mask that broadcasts to (…, T, S).
Tensor part_of_mask(const Tensor& mask, std::int64_t t0, std::int64_t t1, std::int64_t s0, std::int64_t s1) {
  Tensor part = mask;
  if (mask.defined() && mask.dim() >= 1 && mask.size(-1) > 1) {
    part = slice(part, -1, s0, s1);
  }
  if (mask.defined() && mask.dim() >= 2 && mask.size(-2) > 1) {
    part = slice(part, -2, t0, t1);
  }
  return part;
}

// Attention within a window: a block of queries after the other, each with the keys from its first query's window to
// its last query.
Tensor windowed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options) {
  constexpr std::int64_t kLeast = 64, kMostCpu = 256, kMostCuda = 1024;
  const std::int64_t queries = q.size(-2), keys = k.size(-2), window = options.window, offset = options.causal_offset;
  AttentionOptions part = options;
  part.window = 0;
  const std::int64_t block = std::clamp(window, kLeast, q.device().is_cuda() ? kMostCuda : kMostCpu);
  Tensors parts;
  Tensor near;  // (rows, columns): whether a key is within a query's window
  std::int64_t near_shift = 0;
  for (std::int64_t first = 0; first < queries; first += block) {
    const std::int64_t last = std::min(first + block, queries), rows = last - first;
    const std::int64_t end = std::clamp<std::int64_t>(last + offset, 0, keys);
    const std::int64_t begin = std::clamp<std::int64_t>(first + offset - window + 1, 0, end), columns = end - begin;
    part.causal_offset = std::clamp(first + offset - begin, -rows, std::max(rows, columns));
    part.mask = part_of_mask(options.mask, first, last, begin, end);
    if (last + offset > window && rows > 1) {
      // Query first + i sees key begin + j if j > i + shift.
      const std::int64_t shift = first + offset - window - begin;
      if (!near.defined() || near_shift != shift || near.shape() != Shape{rows, columns}) {
        near = detail::columns_after(rows, columns, shift, q.device());
        near_shift = shift;
      }
      if (!part.mask.defined()) {
        part.mask = near;
      } else if (part.mask.dtype() == boolean) {
        part.mask = logical_and(part.mask, near);
      } else {
        part.mask = where(near, part.mask, -std::numeric_limits<double>::infinity());
      }
    }
    parts.push_back(scaled_dot_product_attention(slice(q, -2, first, last), slice(k, -2, begin, end),
                                                 slice(v, -2, begin, end), part));
  }
  return cat(parts, -2);
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options) {
  constexpr const char* kName = "scaled_dot_product_attention";
  if (autograd::autocast_active()) {
    const Tensor narrow_q = autograd::narrowed(q), narrow_k = autograd::narrowed(k), narrow_v = autograd::narrowed(v);
    const autograd::Autocast off(std::nullopt);  // composed attention computes scores in float32
    return scaled_dot_product_attention(narrow_q, narrow_k, narrow_v, options);
  }
  check_operands(kName, q, k, v);
  check_options(kName, q, k, options);
  const detail::AttentionRule rule = rule_of(q, options);
  if (std::optional<detail::FusedCall> call = choose(kName, q, k, v, options, rule)) {
    return detail::fused_attention(std::move(*call), q, k, v, rule);
  }
  if (rule.window > 0) {
    return windowed_attention(q, k, v, options);
  }
  return detail::composed_attention(q, k, v, options.mask, rule);
}

Tensor self_attention(const Tensor& qkv, std::int64_t heads, const AttentionOptions& options) {
  constexpr const char* kName = "self_attention";
  if (autograd::autocast_active()) {
    const Tensor narrow = autograd::narrowed(qkv);
    const autograd::Autocast off(std::nullopt);
    return self_attention(narrow, heads, options);
  }
  check(qkv.dim() == 3 && heads >= 1 && qkv.size(2) % (3 * heads) == 0,
        "{}: expected qkv of shape (B, T, 3 · heads · D) and at least one head, got {} and {} heads", kName,
        qkv.shape(), heads);
  check(is_floating(qkv.dtype()), "{}: expected a floating dtype, got {}", kName, qkv.dtype());
  const std::int64_t width = qkv.size(2) / 3;
  const auto by_head = [&](std::int64_t part) {  // (B, H, T, D)
    const Tensor x = slice(qkv, 2, part * width, (part + 1) * width);
    return transpose(reshape(x, {x.size(0), x.size(1), heads, width / heads}), 1, 2);
  };
  const auto joined = [&](const Tensor& y) { return reshape(transpose(y, 1, 2), {qkv.size(0), qkv.size(1), width}); };
  detail::AttentionRule rule;
  std::optional<detail::FusedCall> call;
  {
    const autograd::InsideOp guard;  // these views are not part of the graph
    const Tensor q = by_head(0), k = by_head(1), v = by_head(2);
    check_options(kName, q, k, options);
    rule = rule_of(q, options);
    call = choose(kName, q, k, v, options, rule);
  }
  if (call) {
    return detail::fused_self_attention(std::move(*call), qkv, rule);
  }
  if (rule.window > 0) {
    return joined(windowed_attention(by_head(0), by_head(1), by_head(2), options));
  }
  return joined(detail::composed_attention(by_head(0), by_head(1), by_head(2), options.mask, rule));
}

Tensor document_mask(const Tensor& documents) {
  check(documents.dim() == 2 && !is_floating(documents.dtype()) && documents.dtype() != boolean,
        "document_mask: expected integers of shape (B, T), got {} of {}", documents.shape(), documents.dtype());
  const std::int64_t batch = documents.size(0), length = documents.size(1);
  return eq(reshape(documents, {batch, 1, length, 1}), reshape(documents, {batch, 1, 1, length}));
}

}  // namespace mica
