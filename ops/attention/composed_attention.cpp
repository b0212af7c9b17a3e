#include <limits>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/attention/detail/attention_kernels.h>
#include <mica/ops/attention/detail/composed_attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::detail {

namespace {

// For each row: dscores = scale · weights · (dweights − Σ dweights · weights). Masked weights are 0.
struct AttentionWeightsGradient {
  static constexpr bool composed = true;
  double scale;
  bool causal;
  std::int64_t causal_offset;

  Tensor forward(autograd::Context& ctx, const Tensor& dweights, const Tensor& weights) const {
    const Tensor dscores = empty(dweights.shape(), dweights.dtype(), dweights.device());
    if (dscores.numel() > 0) {
      const Tensor packed = contiguous_data(dweights);
      const kernels::AttentionWeightsBackward args{.weights = weights,
                                                   .dweights = packed,
                                                   .dscores = dscores,
                                                   .scale = scale,
                                                   .causal = causal,
                                                   .causal_offset = causal_offset};
      on_device(dscores.device(), [&](auto device) { kernels::attention_weights_backward(device, args); });
    }
    ctx.save_for_backward(dweights, weights);
    return dscores;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddscores) const {
    const auto [dweights, weights] = ctx.saved<2>();
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = autograd::apply(*this, ddscores, weights);  // linear in dweights, by a symmetric matrix
    }
    if (ctx.needs_grad(1)) {
      const auto row_sum = [](const Tensor& x) { return sum(x, {-1}, true); };
      gradients[1] =
          (ddscores * (dweights - row_sum(dweights * weights)) - dweights * row_sum(ddscores * weights)) * scale;
    }
    return gradients;
  }
};

// softmax(scale · scores), with the causal mask if there is one. Forward and backward are one pass each.
struct AttentionWeights {
  static constexpr bool composed = true;
  double scale;
  bool causal;
  std::int64_t causal_offset;

  Tensor forward(autograd::Context& ctx, const Tensor& scores) const {
    const Tensor weights = empty(scores.shape(), scores.dtype(), scores.device());
    if (weights.numel() > 0) {
      const Tensor packed = contiguous_data(scores);
      const kernels::AttentionWeightsForward args{
          .scores = packed, .weights = weights, .scale = scale, .causal = causal, .causal_offset = causal_offset};
      on_device(scores.device(), [&](auto device) { kernels::attention_weights_forward(device, args); });
    }
    ctx.save_for_backward(weights);
    return weights;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    return {autograd::apply(AttentionWeightsGradient{scale, causal, causal_offset}, dy, ctx.saved<1>()[0])};
  }
};

// Dropout of the weights. Backward drops the same elements, since it uses the same random key.
struct DropWeights {
  static constexpr bool composed = true;
  WeightDropout dropout;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    if (y.numel() > 0) {
      const Tensor packed = contiguous_data(x);
      const kernels::AttentionDropout args{.y = y, .x = packed, .dropout = dropout};
      on_device(x.device(), [&](auto device) { kernels::attention_dropout(device, args); });
    }
    return y;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return autograd::apply(*this, dy); }
};

// For grouped queries: views (…, H, T, n) as (…, Hkv, H / Hkv · T, n), so that a single product multiplies all query
// heads that share a key head.
class Groups {
 public:
  Groups(const Tensor& q, const Tensor& k)
      : grouped_(q.dim() >= 3 && q.size(-3) != k.size(-3)),
        heads_(q.dim() >= 3 ? q.size(-3) : 1),
        key_heads_(k.dim() >= 3 ? k.size(-3) : 1),
        queries_(q.size(-2)) {}

  Tensor by_key_head(const Tensor& x) const {
    return grouped_ ? reshaped(x, key_heads_, heads_ / key_heads_ * queries_) : x;
  }
  Tensor by_query_head(const Tensor& x) const { return grouped_ ? reshaped(x, heads_, queries_) : x; }

 private:
  static Tensor reshaped(const Tensor& x, std::int64_t heads, std::int64_t rows) {
    Shape shape = x.shape().slice(0, x.dim() - 3);
    shape.push_back(heads);
    shape.push_back(rows);
    shape.push_back(x.size(-1));
    return reshape(x, shape);
  }

  bool grouped_;
  std::int64_t heads_, key_heads_, queries_;
};

DType compute_dtype(DType dtype) { return dtype == float64 ? float64 : float32; }

Tensor transposed(const Tensor& x) { return transpose(x, -1, -2); }

Tensor dropped(const Tensor& weights, const AttentionRule& rule) {
  return rule.dropout.drops() ? autograd::apply(DropWeights{rule.dropout}, weights) : weights;
}

// Returns the masked scores, and the scale that remains to be applied: 1 with a mask, since a mask of -inf must not be
// multiplied by a scale that is negative or 0.
std::pair<Tensor, double> masked(const Tensor& scores, const Tensor& mask, double scale) {
  if (!mask.defined()) {
    return {scores, scale};
  }
  const Tensor scaled = scores * scale;
  return {mask.dtype() == boolean ? where(mask, scaled, -std::numeric_limits<double>::infinity())
                                  : scaled + mask.to(scores.dtype()),
          1};
}

}  // namespace

Tensor columns_after(std::int64_t rows, std::int64_t columns, std::int64_t shift, Device device) {
  const Tensor row = arange(static_cast<double>(rows), int64, device);
  const Tensor column = arange(static_cast<double>(columns), int64, device);
  return gt(column, unsqueeze(row, 1) + static_cast<double>(shift));
}

Tensor composed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          const AttentionRule& rule) {
  const DType dtype = compute_dtype(q.dtype());
  const Groups groups(q, k);
  const Tensor queries = groups.by_key_head(q.to(dtype));
  const Tensor products = groups.by_query_head(matmul(queries, transposed(k.to(dtype))));  // (…, H, T, S)
  const auto [scores, scale] = rule.cap > 0 ? masked(tanh(products * (rule.scale / rule.cap)), mask, rule.cap)
                                            : masked(products, mask, rule.scale);
  const Tensor weights =
      dropped(autograd::apply(AttentionWeights{scale, rule.causal, rule.causal_offset}, scores), rule);
  return groups.by_query_head(matmul(groups.by_key_head(weights), v.to(dtype))).to(q.dtype());
}

Tensors composed_attention_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                                     const Tensor& dy, const AttentionRule& rule) {
  const DType dtype = compute_dtype(q.dtype());
  const Groups groups(q, k);
  const Tensor queries = groups.by_key_head(q.to(dtype)), keys = k.to(dtype), values = v.to(dtype);
  const Tensor douts = groups.by_key_head(dy.to(dtype));
  // Only fused kernels without a mask have a window.
  const Tensor seen =
      rule.window == 0 ? mask : columns_after(q.size(-2), k.size(-2), rule.causal_offset - rule.window, q.device());
  const auto [scores, scale] = masked(groups.by_query_head(matmul(queries, transposed(keys))), seen, rule.scale);
  const Tensor weights = autograd::apply(AttentionWeights{scale, rule.causal, rule.causal_offset}, scores);
  const Tensor dvalues = matmul(transposed(groups.by_key_head(dropped(weights, rule))), douts);
  const Tensor dweights = dropped(groups.by_query_head(matmul(douts, transposed(values))), rule);
  const Tensor dscores = groups.by_key_head(
      autograd::apply(AttentionWeightsGradient{rule.scale, rule.causal, rule.causal_offset}, dweights, weights));
  const Tensor dqueries = groups.by_query_head(matmul(dscores, keys));
  const Tensor dkeys = matmul(transposed(dscores), queries);
  return {dqueries.to(q.dtype()), dkeys.to(q.dtype()), dvalues.to(q.dtype())};
}

}  // namespace mica::detail
