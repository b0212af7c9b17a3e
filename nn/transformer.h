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
  /// The result before dropout, for callers that fuse dropout and addition.
  Tensor undropped(const Tensor& x) const;

  Options options;
  Linear c_fc;
  Linear c_proj;
  Dropout dropout;
};

struct TransformerBlockOptions {
  std::int64_t heads = 1;
  double dropout = 0;
  bool causal = true;
  bool bias = true;  ///< of the linear layers and the norms
  GeluApproximation gelu = GeluApproximation::tanh;
};

/// The stream between two blocks: a residual and a branch. The norm that follows applies dropout to the branch, adds it
/// to the residual and normalizes the sum, in one pass.
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
  /// The same for x = residual + dropout(branch), where an undefined branch is 0 and the dropout is that of mlp. The
  /// result is again such a pair: the next module applies dropout and adds.
  ResidualAndBranch operator()(const Tensor& residual, const Tensor& branch) const;

  LayerNorm ln_1;
  MultiheadAttention attn;
  LayerNorm ln_2;
  Mlp mlp;
};

}  // namespace mica::nn
