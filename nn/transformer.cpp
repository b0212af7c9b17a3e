#include <mica/nn/transformer.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/mlp.h>

namespace mica::nn {

namespace {

std::int64_t hidden_width(std::int64_t width, std::optional<std::int64_t> hidden) {
  check(width >= 1 && width <= INT64_MAX / 4, "Mlp: expected a width from 1 to {}, got {}", INT64_MAX / 4, width);
  check(hidden.value_or(1) >= 1, "Mlp: expected a hidden width of at least 1, got {}", hidden.value_or(1));
  return hidden.value_or(4 * width);
}

}  // namespace

Mlp::Mlp(std::int64_t width, Options options)
    : options(options),
      c_fc(child("c_fc", Linear{width, hidden_width(width, options.hidden), {.bias = options.bias}})),
      c_proj(child("c_proj", Linear{hidden_width(width, options.hidden), width, {.bias = options.bias}})),
      dropout(child("dropout", Dropout{options.dropout})) {}

Tensor Mlp::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return dropout(by_layers(x, c_proj.bias)); });
}

Tensor Mlp::branch(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return by_layers(x, {}); });
}

Tensor Mlp::by_layers(const Tensor& x, const Tensor& last_bias) const {
  const bool by_tanh = options.gelu == GeluApproximation::tanh;
  const Activation activation = by_tanh ? Activation::gelu_tanh : Activation::gelu;
  const auto is_plain = [](const Linear& layer) {
    return !layer.has_lora() && !layer.is_quantized() && !layer.has_hooks();
  };
  if (!is_plain(c_fc) || !is_plain(c_proj)) {
    const Tensor y = c_proj.product(c_fc(x, activation));
    return last_bias.defined() ? y + last_bias : y;
  }
  // Both layers in one op: its backward fuses gelu's backward with the product with c_proj's weight.
  return mica::mlp(x, c_fc.weight, c_fc.bias, c_proj.weight, last_bias, activation);
}

TransformerBlock::TransformerBlock(std::int64_t width, TransformerBlockOptions options)
    : ln_1(child("ln_1", LayerNorm{width, {.eps = options.norm_eps, .bias = options.bias}})),
      attn(child("attn", MultiheadAttention{width,
                                            {.heads = options.heads,
                                             .dropout = options.dropout,
                                             .causal = options.causal,
                                             .bias = options.bias,
                                             .attention_dropout = options.attention_dropout}})),
      ln_2(child("ln_2", LayerNorm{width, {.eps = options.norm_eps, .bias = options.bias}})),
      mlp(child(
          "mlp",
          Mlp{width,
              {.dropout = options.dropout, .bias = options.bias, .gelu = options.gelu, .hidden = options.hidden}})) {}

Tensor TransformerBlock::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) {
    const auto [y, y_normed] = up_to_mlp(x, {}, {});
    return y + mlp(y_normed);
  });
}

ResidualAndBranch TransformerBlock::operator()(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias,
                                               const Tensor& mask, const CachedLayer& cached) const {
  return call(*this, residual, branch, branch_bias, mask,
              [&](const Tensor& residual, const Tensor& branch, const Tensor& branch_bias, const Tensor& mask) {
                const auto [y, y_normed] = up_to_mlp(residual, branch, branch_bias, mask, cached);
                return ResidualAndBranch{y, mlp.branch(y_normed)};
              });
}

AddLayerNormResult TransformerBlock::up_to_mlp(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias,
                                               const Tensor& mask, const CachedLayer& cached) const {
  const auto [x, x_normed] = branch.defined() ? ln_1(branch, residual, mlp.dropout, branch_bias)
                                              : AddLayerNormResult{residual, ln_1(residual)};
  return ln_2(attn.branch(x_normed, mask, cached), x, attn.resid_dropout, attn.c_proj.bias);
}

}  // namespace mica::nn
