#pragma once

#include <array>

#include <mica/nn/attention.h>
#include <mica/nn/layer_norm.h>
#include <mica/nn/module.h>
#include <mica/ops/elementwise/unary.h>

namespace mica::nn {

/// The feed-forward part of a block: c_proj(gelu(c_fc(x))), with an inner width of 4 · width.
class Mlp : public Module {
 public:
  struct Options {
    double dropout = 0;
    bool bias = true;
    GeluApproximation gelu = GeluApproximation::tanh;  // GPT-2's
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
};

/// The stream between two blocks: a residual and a branch, that of mlp. The norm that follows adds the branch's bias,
/// applies dropout, adds the residual and normalizes the sum, in one pass; its backward has the gradient of that bias.
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
  /// The same for x = residual + dropout(branch + branch_bias), where an undefined branch or bias is 0 and the dropout
  /// is that of mlp. The result is again such a pair, whose branch lacks mlp.c_proj.bias: the next module adds it,
  /// applies dropout and adds the residual.
  /// With `cached`, attention sees the positions in the cache as well.
  ResidualAndBranch operator()(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias = {},
                               const CachedLayer& cached = {}) const;
  /// The same, and attention sees only what `mask` lets it: see AttentionOptions::mask. It may be undefined.
  ResidualAndBranch operator()(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias,
                               const Tensor& mask) const;

  LayerNorm ln_1;
  MultiheadAttention attn;
  LayerNorm ln_2;
  Mlp mlp;

 private:
  /// The stream after attention, and its norm.
  AddLayerNormResult up_to_mlp(const Tensor& residual, const Tensor& branch, const Tensor& branch_bias,
                               const CachedLayer& cached = {}, const Tensor& mask = {}) const;
};

}  // namespace mica::nn
