#include <algorithm>
#include <cmath>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/attention/attention_kernels.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// dscores = scale · weights · (dweights − Σ dweights · weights), row by row. Where the mask is, weights are 0.
struct AttentionWeightsGradient {
  static constexpr bool composed = true;
  double scale;
  bool causal;

  Tensor forward(autograd::Context& ctx, const Tensor& dweights, const Tensor& weights) const {
    const Tensor dscores = empty(dweights.shape(), dweights.dtype(), dweights.device());
    if (dscores.numel() > 0) {
      const Tensor packed = contiguous_data(dweights);
      const kernels::AttentionWeightsBackward args{
          .weights = weights, .dweights = packed, .dscores = dscores, .scale = scale, .causal = causal};
      on_device(dscores.device(), [&](auto device) { kernels::attention_weights_backward(device, args); });
    }
    ctx.save_for_backward(dweights, weights);
    return dscores;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddscores) const {
    const auto [dweights, weights] = ctx.saved<2>();
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = autograd::apply(*this, ddscores, weights);  // it is its own transpose
    }
    if (ctx.needs_grad(1)) {
      const auto row_sum = [](const Tensor& x) { return sum(x, {-1}, true); };
      gradients[1] =
          (ddscores * (dweights - row_sum(dweights * weights)) - dweights * row_sum(ddscores * weights)) * scale;
    }
    return gradients;
  }
};

// softmax(scale · scores) with the causal mask, in one pass each way.
struct AttentionWeights {
  static constexpr bool composed = true;
  double scale;
  bool causal;

  Tensor forward(autograd::Context& ctx, const Tensor& scores) const {
    const Tensor weights = empty(scores.shape(), scores.dtype(), scores.device());
    if (weights.numel() > 0) {
      const Tensor packed = contiguous_data(scores);
      const kernels::AttentionWeightsForward args{
          .scores = packed, .weights = weights, .scale = scale, .causal = causal};
      on_device(scores.device(), [&](auto device) { kernels::attention_weights_forward(device, args); });
    }
    ctx.save_for_backward(weights);
    return weights;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    return {autograd::apply(AttentionWeightsGradient{scale, causal}, dy, ctx.saved<1>()[0])};
  }
};

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionOptions options) {
  constexpr const char* kName = "scaled_dot_product_attention";
  const int rank = q.dim();
  check(rank >= 2 && k.dim() == rank && v.dim() == rank,
        "{}: expected q, k and v of shapes (B, H, T, D), (B, H, S, D) and (B, H, S, Dv), got {}, {} and {}", kName,
        q.shape(), k.shape(), v.shape());
  const Shape leading = q.shape().slice(0, rank - 2);
  check(k.shape().slice(0, rank - 2) == leading && v.shape().slice(0, rank - 2) == leading,
        "{}: expected q, k and v with equal leading axes, got {}, {} and {}", kName, q.shape(), k.shape(), v.shape());
  check(k.size(-1) == q.size(-1), "{}: expected k with a last axis of {} as q's, got {}", kName, q.size(-1), k.shape());
  check(v.size(-2) == k.size(-2), "{}: expected v with {} rows as k, got {}", kName, k.size(-2), v.shape());
  check(is_floating(q.dtype()) && k.dtype() == q.dtype() && v.dtype() == q.dtype(),
        "{}: expected one floating dtype, got {}, {} and {}", kName, q.dtype(), k.dtype(), v.dtype());
  check(k.device() == q.device() && v.device() == q.device(), "{}: expected one device, got {}, {} and {}", kName,
        q.device(), k.device(), v.device());
  check(options.dropout >= 0 && options.dropout < 1, "{}: expected dropout in [0, 1), got {}", kName, options.dropout);

  const double width = static_cast<double>(std::max<std::int64_t>(q.size(-1), 1));
  const double scale = options.scale.value_or(1 / std::sqrt(width));
  const Tensor scores = matmul(q, transpose(k, -1, -2));  // (B, H, T, S)
  Tensor weights = autograd::apply(AttentionWeights{scale, options.causal}, scores);
  if (options.dropout > 0) {
    const Tensor kept = rand(weights.shape(), float32, weights.device()) >= options.dropout;
    weights = where(kept, weights * (1 / (1 - options.dropout)), 0);
  }
  return matmul(weights, v);
}

}  // namespace mica
