#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/layer_norm/layer_norm.h>
#include <mica/ops/layer_norm/layer_norm_kernels.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

struct LayerNorm {
  static constexpr bool composed = true;
  std::int64_t rows;
  std::int64_t columns;
  double eps;
  int row_dim;         // axes of a row
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
      mean = empty({rows}, accumulate_dtype(x.dtype()), x.device());
      rstd = empty_like(mean);
    }
    const kernels::LayerNormForward args{.rows = rows,
                                         .columns = columns,
                                         .x = x_rows,
                                         .weight = weight_row,
                                         .bias = bias_row,
                                         .eps = eps,
                                         .y = y,
                                         .mean = mean,
                                         .rstd = rstd};
    on_device(x.device(), [&](auto device) { kernels::layer_norm_forward(device, args); });
    ctx.save_for_backward(x, weight, mean, rstd);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, weight, mean, rstd] = ctx.saved<4>();
    if (autograd::grad_enabled()) {
      return recorded_backward(ctx, dy, x, weight);
    }
    const Shape row_shape = dy.shape().slice(dy.dim() - row_dim);
    Tensor dx;
    Tensor dweight;
    Tensor dbias;
    if (ctx.needs_grad(0)) {
      dx = empty(dy.shape(), dy.dtype(), dy.device());
    }
    if (ctx.needs_grad(1)) {
      dweight = empty(row_shape, weight_dtype, dy.device());
    }
    if (ctx.needs_grad(2)) {
      dbias = empty(row_shape, weight_dtype, dy.device());
    }
    if (columns > 0 && (rows > 0 || dweight.defined() || dbias.defined())) {
      const Tensor dy_rows = contiguous_data(dy);
      const Tensor x_rows = contiguous_data(x);
      const Tensor weight_row = contiguous_or_absent(weight);
      const kernels::LayerNormBackward args{.rows = rows,
                                            .columns = columns,
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

 private:
  // The same by recorded ops, for those who differentiate it again.
  Tensors recorded_backward(const autograd::Context& ctx, const Tensor& dy, const Tensor& x,
                            const Tensor& weight) const {
    const DType sums = accumulate_dtype(x.dtype());
    const auto matrix_of = [&](const Tensor& t) { return reshape(t.to(sums), {rows, columns}); };
    const auto row_mean = [](const Tensor& t) { return mica::mean(t, {1}, true); };
    const Shape row_shape = dy.shape().slice(dy.dim() - row_dim);
    const Tensor dys = matrix_of(dy);
    const Tensor xs = matrix_of(x);
    const Tensor centered = xs - row_mean(xs);
    const Tensor rstd = mica::rsqrt(row_mean(centered * centered) + eps);
    const Tensor x_hat = centered * rstd;
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      const Tensor g = weight.defined() ? dys * reshape(weight.to(sums), {columns}) : dys;
      const Tensor dx = (g - row_mean(g) - x_hat * row_mean(g * x_hat)) * rstd;
      gradients[0] = reshape(dx.to(x.dtype()), dy.shape());
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = reshape(sum(dys * x_hat, {0}).to(weight_dtype), row_shape);
    }
    if (ctx.needs_grad(2)) {
      gradients[2] = reshape(sum(dys, {0}).to(weight_dtype), row_shape);
    }
    return gradients;
  }

  static Tensor contiguous_or_absent(const Tensor& x) { return x.defined() ? contiguous_data(x) : x; }
};

void check_parameter(const char* name, const Tensor& parameter, const Tensor& x, const Shape& normalized_shape) {
  if (!parameter.defined()) {
    return;
  }
  check(parameter.shape() == normalized_shape, "layer_norm: expected {} of shape {}, got {}", name, normalized_shape,
        parameter.shape());
  const DType sums = accumulate_dtype(x.dtype());
  check(parameter.dtype() == x.dtype() || parameter.dtype() == sums, "layer_norm: expected {} of {}{}{}, got {}", name,
        x.dtype(), sums == x.dtype() ? "" : " or ", sums == x.dtype() ? "" : name_of(sums), parameter.dtype());
  check(parameter.device() == x.device(), "layer_norm: expected {} on {}, got it on {}", name, x.device(),
        parameter.device());
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  check(x.defined(), "layer_norm: expected a defined x, got an undefined one");
  check(is_floating(x.dtype()), "layer_norm: expected x of a floating dtype, got {}", x.dtype());
  check(!normalized_shape.empty(), "layer_norm: expected normalized_shape of at least one axis, got []");
  const int leading = x.dim() - normalized_shape.size();
  check(leading >= 0 && x.shape().slice(leading) == normalized_shape,
        "layer_norm: expected x of a shape that ends in {}, got {}", normalized_shape, x.shape());
  check_parameter("weight", weight, x, normalized_shape);
  check_parameter("bias", bias, x, normalized_shape);
  if (weight.defined() && bias.defined()) {
    check(weight.dtype() == bias.dtype(), "layer_norm: expected bias of weight's {}, got {}", weight.dtype(),
          bias.dtype());
  }
  check(eps >= 0, "layer_norm: expected eps of at least 0, got {}", eps);

  const Tensor& parameter = weight.defined() ? weight : bias;
  return autograd::apply(LayerNorm{.rows = numel_of(x.shape().slice(0, leading)),
                                   .columns = numel_of(normalized_shape),
                                   .eps = eps,
                                   .row_dim = normalized_shape.size(),
                                   .weight_dtype = parameter.defined() ? parameter.dtype() : x.dtype()},
                         x, weight, bias);
}

}  // namespace mica
