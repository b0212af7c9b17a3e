#include <mica/nn/attention.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

namespace {

const MultiheadAttentionOptions& checked(std::int64_t width, const MultiheadAttentionOptions& options) {
  check(width >= 1 && options.heads >= 1 && width % options.heads == 0,
        "MultiheadAttention: expected heads to divide width, got width {} and heads {}", width, options.heads);
  check(width <= INT64_MAX / 3, "MultiheadAttention: a width of {} is too large", width);
  return options;
}

}  // namespace

MultiheadAttention::MultiheadAttention(std::int64_t width, MultiheadAttentionOptions options)
    : options(checked(width, options)),
      c_attn(child("c_attn", Linear{width, 3 * width, {.bias = options.bias}})),
      c_proj(child("c_proj", Linear{width, width, {.bias = options.bias}})),
      resid_dropout(child("resid_dropout", Dropout{options.dropout})) {}

Tensor MultiheadAttention::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return resid_dropout(c_proj(attend(x))); });
}

Tensor MultiheadAttention::branch(const Tensor& x, const Tensor& mask, const CachedLayer& cached) const {
  return call(*this, x, mask,
              [&](const Tensor& x, const Tensor& mask) { return c_proj.product(attend(x, mask, cached)); });
}

Tensor MultiheadAttention::attend(const Tensor& x, const Tensor& mask, const CachedLayer& cached) const {
  const std::int64_t width = c_proj.out_features();
  check(x.dim() == 3 && x.size(2) == width, "MultiheadAttention: expected (B, T, {}), got {}", width, x.shape());
  if (cached) {
    check(options.causal && !mask.defined(), "MultiheadAttention: a cache is for causal attention without a mask");
    const Tensor qkv = reshape(c_attn(x), {x.size(0), x.size(1), 3, options.heads, width / options.heads});
    const auto part = [&](std::int64_t i) { return transpose(select(qkv, 2, i), 1, 2); };  // (B, heads, T, D)
    return cached.cache->attend(cached.layer, part(0), part(1), part(2));
  }
  const double dropout = is_training() ? options.attention_dropout.value_or(options.dropout) : 0;
  return self_attention(c_attn(x), options.heads, {.causal = options.causal, .dropout = dropout, .mask = mask});
}

}  // namespace mica::nn
