#include <array>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/norm/detail/layer_norm_kernels.h>
#include <mica/ops/norm/detail/layer_norm_ops.h>
#include <mica/ops/norm/detail/norm_ops.h>
#include <mica/ops/norm/layer_norm.h>
#include <mica/ops/view/view.h>

namespace mica {

using norm::contiguous_or_absent;

namespace {

// What a layer norm looks like: rows of so many columns, under the last `row_dim` axes.
struct LayerNormRows {
  std::int64_t rows;
  std::int64_t columns;
  int row_dim;
  double eps;
};

// rstd, which is known, as a function of x (rows, columns): ∂rstd/∂x = −rstd² x̂ / columns. (rows, 1)
struct RowScale {
  static constexpr bool composed = true;
  double eps;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& rstd) const {
    ctx.save_for_backward(x, rstd);
    return reshape(rstd.detach(), {x.size(0), 1});
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dr) const {
    const auto [x, rstd] = ctx.saved<2>();
    const Tensor r = autograd::apply(*this, x, rstd);
    const Tensor x_hat = layer_norm(x, {x.size(1)}, {}, {}, eps);
    return {x_hat * (dr * r * r * (-1.0 / static_cast<double>(x.size(1)))), Tensor{}};
  }
};

// (dx, dweight, dbias) by the fused kernels, those that are not wanted undefined. mean and rstd are x's, not arguments
// of their own. README.md derives what its backward computes.
struct LayerNormGradient {
  static constexpr bool composed = true;
  LayerNormRows size;
  DType weight_dtype;
  std::array<bool, 3> wanted;

  Tensors forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                  const Tensor& rstd) const {
    ctx.set_materialize_grads(false);
    ctx.save_for_backward(dy, x, weight, mean, rstd);
    const Shape row_shape = dy.shape().slice(dy.dim() - size.row_dim);
    const Tensor dx = wanted[0] ? empty(dy.shape(), dy.dtype(), dy.device()) : Tensor{};
    const Tensor dweight = wanted[1] ? empty(row_shape, weight_dtype, dy.device()) : Tensor{};
    const Tensor dbias = wanted[2] ? empty(row_shape, weight_dtype, dy.device()) : Tensor{};
    if (size.columns > 0 && (size.rows > 0 || wanted[1] || wanted[2])) {
      const Tensor dy_rows = contiguous_data(dy);
      const Tensor x_rows = contiguous_data(x);
      const Tensor weight_row = contiguous_or_absent(weight);
      const kernels::LayerNormBackward args{.rows = size.rows,
                                            .columns = size.columns,
                                            .dy = dy_rows,
                                            .x = x_rows,
                                            .weight = weight_row,
                                            .mean = mean,
                                            .rstd = rstd,
                                            .dx = dx,
                                            .dweight = dweight,
                                            .dbias = dbias};
      on_device(dy.device(), [&](auto device) { kernels::layer_norm_backward(device, args); });
    }
    return {dx, dweight, dbias};
  }

  // a, b, c: the gradients of dx, dweight and dbias, undefined where none came.
  Tensors backward(autograd::Context& ctx, const Tensor& a, const Tensor& b, const Tensor& c) const {
    const auto [dy, x, weight, mean, rstd] = ctx.saved<5>();
    const norm::Normalization parts{
        .normalize = [&](const Tensor& x) { return layer_norm(x, {size.columns}, {}, {}, size.eps); },
        .project =
            [&, &mean = mean, &rstd = rstd](const Tensor& v, const Tensor& x) {
              const LayerNormGradient dx_only{
                  .size = {.rows = size.rows, .columns = size.columns, .row_dim = 1, .eps = size.eps},
                  .weight_dtype = x.dtype(),
                  .wanted = {true, false, false}};
              return autograd::apply(dx_only, v, x, Tensor{}, mean, rstd)[0];
            },
        .rstd = [&, &rstd = rstd](const Tensor& x) { return autograd::apply(RowScale{size.eps}, x, rstd); }};
    const norm::Gradients g = norm::second_derivative(ctx, parts, size.columns, dy, x, weight, a, b, c);
    return {g.dy, g.x, g.weight, Tensor{}, Tensor{}};
  }
};

struct LayerNorm {
  static constexpr bool composed = true;
  LayerNormRows size;
  DType weight_dtype;  // of weight and bias

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) const {
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    if (y.numel() == 0) {
      ctx.save_for_backward(x, weight, Tensor{}, Tensor{});
      return y;
    }
    const Tensor x_rows = contiguous_data(x);
    const Tensor weight_row = contiguous_or_absent(weight);
    const Tensor bias_row = contiguous_or_absent(bias);
    Tensor mean;
    Tensor rstd;
    if (ctx.needs_any_grad()) {
      mean = empty({kernels::mean_parts(x.dtype()), size.rows}, accumulate_dtype(x.dtype()), x.device());
      rstd = empty({size.rows}, mean.dtype(), x.device());
    }
    const kernels::LayerNormForward args{.rows = size.rows,
                                         .columns = size.columns,
                                         .x = x_rows,
                                         .weight = weight_row,
                                         .bias = bias_row,
                                         .eps = size.eps,
                                         .y = y,
                                         .mean = mean,
                                         .rstd = rstd};
    on_device(x.device(), [&](auto device) { kernels::layer_norm_forward(device, args); });
    ctx.save_for_backward(x, weight, mean, rstd);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, weight, mean, rstd] = ctx.saved<4>();
    const LayerNormGradient gradient{.size = size,
                                     .weight_dtype = weight_dtype,
                                     .wanted = {ctx.needs_grad(0), ctx.needs_grad(1), ctx.needs_grad(2)}};
    return autograd::apply(gradient, dy, x, weight, mean, rstd);
  }
};

}  // namespace

Tensors detail::layer_norm_gradient(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                                    const Tensor& rstd, int row_dim, double eps, DType weight_dtype,
                                    std::array<bool, 3> wanted) {
  const int leading = x.dim() - row_dim;
  const LayerNormGradient gradient{.size = {.rows = numel_of(x.shape().slice(0, leading)),
                                            .columns = numel_of(x.shape().slice(leading)),
                                            .row_dim = row_dim,
                                            .eps = eps},
                                   .weight_dtype = weight_dtype,
                                   .wanted = wanted};
  return autograd::apply(gradient, dy, x, weight, mean, rstd);
}

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  if (autograd::autocast_widens(x)) {
    return layer_norm(autograd::widened(x), normalized_shape, autograd::widened(weight), autograd::widened(bias), eps);
  }
  const int leading = norm::check_normalized("layer_norm", x, normalized_shape);
  norm::check_parameter("layer_norm", "weight", weight, x, normalized_shape);
  norm::check_parameter("layer_norm", "bias", bias, x, normalized_shape);
  if (weight.defined() && bias.defined()) {
    check(weight.dtype() == bias.dtype(), "layer_norm: expected bias of weight's {}, got {}", weight.dtype(),
          bias.dtype());
  }
  check(eps >= 0, "layer_norm: expected eps of at least 0, got {}", eps);

  const Tensor& parameter = weight.defined() ? weight : bias;
  return autograd::apply(LayerNorm{.size = {.rows = numel_of(x.shape().slice(0, leading)),
                                            .columns = numel_of(normalized_shape),
                                            .row_dim = normalized_shape.size(),
                                            .eps = eps},
                                   .weight_dtype = parameter.defined() ? parameter.dtype() : x.dtype()},
                         x, weight, bias);
}

}  // namespace mica
