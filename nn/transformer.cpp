#include <mica/nn/transformer.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/matmul/mlp.h>

namespace mica::nn {

namespace {

std::int64_t hidden_width(std::int64_t width) {
  check(width >= 1 && width <= INT64_MAX / 4, "Mlp: expected a width from 1 to {}, got {}", INT64_MAX / 4, width);
  return 4 * width;
}

}  // namespace

Mlp::Mlp(std::int64_t width, Options options)
    : options(options),
      c_fc(child("c_fc", Linear{width, hidden_width(width), {.bias = options.bias}})),
      c_proj(child("c_proj", Linear{hidden_width(width), width, {.bias = options.bias}})),
      dropout(child("dropout", Dropout{options.dropout})) {}

Tensor Mlp::operator()(const Tensor& x) const {
  const Scope scope(*this);
  return dropout(undropped(x));
}

Tensor Mlp::undropped(const Tensor& x) const {
  const Scope scope(*this);
  const bool by_tanh = options.gelu == GeluApproximation::tanh;
  // Both layers in one op: its backward goes through gelu in the product with c_proj's weight.
  return mica::mlp(x, c_fc.weight, c_fc.bias, c_proj.weight, c_proj.bias,
                   by_tanh ? Activation::gelu_tanh : Activation::gelu);
}

TransformerBlock::TransformerBlock(std::int64_t width, TransformerBlockOptions options)
    : ln_1(child("ln_1", LayerNorm{width, {.bias = options.bias}})),
      attn(child(
          "attn",
          MultiheadAttention{
              width,
              {.heads = options.heads, .dropout = options.dropout, .causal = options.causal, .bias = options.bias}})),
      ln_2(child("ln_2", LayerNorm{width, {.bias = options.bias}})),
      mlp(child("mlp", Mlp{width, {.dropout = options.dropout, .bias = options.bias, .gelu = options.gelu}})) {}

Tensor TransformerBlock::operator()(const Tensor& x) const {
  const Scope scope(*this);
  const auto [residual, branch] = (*this)(x, {});
  return residual + mlp.dropout(branch);
}

ResidualAndBranch TransformerBlock::operator()(const Tensor& residual, const Tensor& branch) const {
  const Scope scope(*this);
  const auto [x, x_normed] =
      branch.defined() ? ln_1(branch, residual, mlp.dropout) : AddLayerNormResult{residual, ln_1(residual)};
  const auto [y, y_normed] = ln_2(attn.undropped(x_normed), x, attn.resid_dropout);
  return {y, mlp.undropped(y_normed)};
}

}  // namespace mica::nn
