#pragma once

#include <array>
#include <optional>

#include <mica/nn/attention.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/module.h>
#include <mica/ops/elementwise/unary.h>

namespace mica::nn {

/// The feed-forward part of a block, x (…, width) to (…, width): c_proj(gelu(c_fc(x))).
class Mlp : public Module {
 public:
  struct Options {
    double dropout = 0;
    bool bias = true;
    GeluApproximation gelu = GeluApproximation::tanh;  // GPT-2's
    std::optional<std::int64_t> hidden{};              ///< the inner width; by default 4 · width
  };

  Mlp(std::int64_t width, Options options);

  Tensor operator()(const Tensor& x) const;
  /// The result without c_proj's bias and dropout, for callers that fuse these with the addition.
  Tensor branch(const Tensor& x) const;

  Options options;
  Linear c_fc;
  Linear c_proj;
  Dropout dropout;

 private:
  Tensor by_layers(const Tensor& x, const Tensor& last_bias) const;
};

struct TransformerBlockOptions {
  std::int64_t heads = 1;
  double dropout = 0;
  bool causal = true;
  bool bias = true;  ///< of the linear layers and the norms
  GeluApproximation gelu = GeluApproximation::tanh;
  double norm_eps = 1e-5;
  std::optional<double> attention_dropout{};  ///< of the attention weights, if it differs
  std::optional<std::int64_t> hidden{};       ///< inner width of the feed-forward part; by default 4 · width
};

/// The data between two blocks: a residual and a branch, the output of mlp without its bias. The next norm adds the
/// bias, applies dropout, adds the residual and normalizes the sum, in one pass; its backward computes the bias's
/// gradient.
using ResidualAndBranch = std::array<Tensor, 2>;

/// One pre-norm block of a transformer, x (B, T, width) to (B, T, width):
///
///     x ← x + attn(ln_1(x))
///     x ← x + mlp(ln_2(x))
///
/// attn and mlp end in a dropout.
class TransformerBlock : public Module {
 public:
  TransformerBlock(std::int64_t width, TransformerBlockOptions options);

  Tensor operator()(const Tensor& x) const;
  /// The same for x = residual + dropout(branch + branch_bias), where an undefined branch or bias counts as 0 and
  /// the dropout is that of mlp. Returns such a pair for the next module, which adds mlp.c_proj.bias to its
  /// branch, applies dropout and adds the residual. `mask` and `cached`: see MultiheadAttention::branch.
  ResidualAndBranch operator()(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias = {},
                               const Tensor& mask = {}, const CachedLayer& cached = {}) const;

  LayerNorm ln_1;
  MultiheadAttention attn;
  LayerNorm ln_2;
  Mlp mlp;

 private:
  /// The sum after attention, and its norm.
  AddLayerNormResult up_to_mlp(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias,
                               const Tensor& mask = {}, const CachedLayer& cached = {}) const;
};

}  // namespace mica::nn
