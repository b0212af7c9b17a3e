#include <array>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/dropout/detail/dropout_ops.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/norm/add_layer_norm.h>
#include <mica/ops/norm/detail/add_layer_norm_kernels.h>
#include <mica/ops/norm/detail/layer_norm_kernels.h>
#include <mica/ops/norm/detail/layer_norm_ops.h>
#include <mica/ops/norm/detail/norm_ops.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

namespace {

using norm::contiguous_or_absent;

// By kernels of other ops.
void forward_in_steps(const kernels::AddLayerNormForward& a) {
  const Tensor addend = a.x_bias.defined() || a.dropout.drops() ? empty_like(a.x) : a.x;
  if (a.x_bias.defined()) {
    on_device(a.x.device(), [&](auto device) { kernels::binary(device, functions::Add{}, addend, a.x, a.x_bias); });
  }
  if (a.dropout.drops()) {
    detail::write_dropped(addend, a.x_bias.defined() ? addend : a.x, a.dropout);
  }
  const kernels::LayerNormForward norm{.rows = a.rows,
                                       .columns = a.columns,
                                       .x = a.sum,
                                       .weight = a.weight,
                                       .bias = a.bias,
                                       .eps = a.eps,
                                       .y = a.y,
                                       .mean = a.mean,
                                       .rstd = a.rstd};
  on_device(a.x.device(), [&](auto device) {
    kernels::binary(device, functions::Add{}, a.sum, a.residual, addend);
    kernels::layer_norm_forward(device, norm);
  });
}

struct AddLayerNorm {
  static constexpr bool composed = true;
  std::int64_t rows;
  std::int64_t columns;
  ElementDropout dropout;
  double eps;
  Shape row_shape;
  DType weight_dtype;  // of weight and bias

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                const Tensor& bias, const Tensor& x_bias) const {
    ctx.set_materialize_grads(false);
    const Tensor sum = empty(x.shape(), x.dtype(), x.device());
    const Tensor y = empty_like(sum);
    Tensor mean;
    Tensor rstd;
    if (y.numel() > 0) {
      const Tensor x_rows = contiguous_data(x);
      const Tensor residual_rows = contiguous_data(residual);
      const Tensor weight_row = contiguous_or_absent(weight);
      const Tensor bias_row = contiguous_or_absent(bias);
      const Tensor x_bias_row = contiguous_or_absent(x_bias);
      if (ctx.needs_any_grad()) {
        mean = empty({kernels::mean_parts(x.dtype()), rows}, accumulate_dtype(x.dtype()), x.device());
        rstd = empty({rows}, mean.dtype(), x.device());
      }
      const kernels::AddLayerNormForward args{.rows = rows,
                                              .columns = columns,
                                              .x = x_rows,
                                              .residual = residual_rows,
                                              .weight = weight_row,
                                              .bias = bias_row,
                                              .x_bias = x_bias_row,
                                              .dropout = dropout,
                                              .eps = eps,
                                              .sum = sum,
                                              .y = y,
                                              .mean = mean,
                                              .rstd = rstd};
      if (!on_device(x.device(), [&](auto device) { return kernels::add_layer_norm_forward(device, args); })) {
        forward_in_steps(args);
      }
    }
    ctx.save_for_backward(sum, weight, mean, rstd);
    return {sum, y};
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dsum, const Tensor& dy) const {
    const auto [sum, weight, mean, rstd] = ctx.saved<4>();
    const bool recorded = autograd::grad_enabled();
    if (dsum.defined() && dy.defined() && !recorded && sum.numel() > 0 && dy.device().is_cuda()) {
      Tensors gradients;
      if (in_one_pass(ctx, dsum, dy, {sum, weight, mean, rstd}, gradients)) {
        return gradients;
      }
    }
    Tensors d(3);  // of layer_norm's argument and parameters
    if (dy.defined()) {
      d = detail::layer_norm_gradient(
          dy, sum, weight, mean, rstd, row_shape.size(), eps, weight_dtype,
          {ctx.needs_grad(0) || ctx.needs_grad(1) || ctx.needs_grad(4), ctx.needs_grad(2), ctx.needs_grad(3)});
    }
    const Tensor dresidual = !d[0].defined() ? dsum : !dsum.defined() ? d[0] : d[0] + dsum;
    Tensor dx;
    if ((ctx.needs_grad(0) || ctx.needs_grad(4)) && dresidual.defined()) {
      dx = dropout.drops() && dresidual.numel() > 0 ? detail::dropped(dresidual, dropout) : dresidual;
    }
    return {ctx.needs_grad(0) ? dx : Tensor{}, ctx.needs_grad(1) ? dresidual : Tensor{}, d[1], d[2],
            ctx.needs_grad(4) && dx.defined() ? sum_to(dx, row_shape) : Tensor{}};
  }

 private:
  struct Saved {
    const Tensor& sum;
    const Tensor& weight;
    const Tensor& mean;
    const Tensor& rstd;
  };

  // All gradients, where there is a kernel for them.
  bool in_one_pass(autograd::Context& ctx, const Tensor& dsum, const Tensor& dy, const Saved& saved,
                   Tensors& gradients) const {
    const bool other_dx = dropout.drops();
    const bool wants_dx = ctx.needs_grad(0) || ctx.needs_grad(4);
    const auto matrix = [&](bool wanted) { return wanted ? empty_like(saved.sum) : Tensor{}; };
    const Tensor dresidual = matrix(ctx.needs_grad(1) || (wants_dx && !other_dx));
    const Tensor dx = matrix(wants_dx && other_dx);
    const auto row = [&](bool wanted) { return wanted ? empty(row_shape, weight_dtype, dy.device()) : Tensor{}; };
    const Tensor dweight = row(ctx.needs_grad(2));
    const Tensor dbias = row(ctx.needs_grad(3));
    const bool sums_dx = ctx.needs_grad(4) && kernels::add_layer_norm_sums_dx(dy.dtype(), columns);
    Tensor dx_bias = sums_dx ? empty(row_shape, dy.dtype(), dy.device()) : Tensor{};
    const Tensor dsum_rows = contiguous_data(dsum);
    const Tensor dy_rows = contiguous_data(dy);
    const Tensor weight_row = contiguous_or_absent(saved.weight);
    const kernels::AddLayerNormBackward args{.rows = rows,
                                             .columns = columns,
                                             .dsum = dsum_rows,
                                             .dy = dy_rows,
                                             .sum = saved.sum,
                                             .weight = weight_row,
                                             .mean = saved.mean,
                                             .rstd = saved.rstd,
                                             .dropout = dropout,
                                             .dresidual = dresidual,
                                             .dx = dx,
                                             .dweight = dweight,
                                             .dbias = dbias,
                                             .dx_bias = dx_bias};
    if (!on_device(dy.device(), [&](auto device) { return kernels::add_layer_norm_backward(device, args); })) {
      return false;
    }
    const Tensor& of_x = other_dx ? dx : dresidual;
    if (ctx.needs_grad(4) && !sums_dx) {
      dx_bias = sum_to(of_x, row_shape);
    }
    gradients = {ctx.needs_grad(0) ? of_x : Tensor{}, ctx.needs_grad(1) ? dresidual : Tensor{}, dweight, dbias,
                 dx_bias};
    return true;
  }
};

}  // namespace

AddLayerNormResult add_layer_norm(const Tensor& x, const Tensor& residual, const Shape& normalized_shape,
                                  const Tensor& weight, const Tensor& bias, AddLayerNormOptions options) {
  if (autograd::autocast_widens(x, residual)) {
    if (options.x_bias.defined()) {
      options.x_bias = autograd::widened(options.x_bias);
    }
    return add_layer_norm(autograd::widened(x), autograd::widened(residual), normalized_shape,
                          autograd::widened(weight), autograd::widened(bias), options);
  }
  check(x.defined() && residual.defined(), "add_layer_norm: expected x and residual, got an undefined one");
  const int leading = norm::check_normalized("add_layer_norm", x, normalized_shape);
  check(residual.shape() == x.shape() && residual.dtype() == x.dtype() && residual.device() == x.device(),
        "add_layer_norm: expected residual like x, {} {} on {}, got {} {} on {}", x.dtype(), x.shape(), x.device(),
        residual.dtype(), residual.shape(), residual.device());
  norm::check_parameter("add_layer_norm", "weight", weight, x, normalized_shape);
  norm::check_parameter("add_layer_norm", "bias", bias, x, normalized_shape);
  if (weight.defined() && bias.defined()) {
    check(weight.dtype() == bias.dtype(), "add_layer_norm: expected bias of weight's {}, got {}", weight.dtype(),
          bias.dtype());
  }
  norm::check_parameter("add_layer_norm", "x_bias", options.x_bias, x, normalized_shape);
  if (options.x_bias.defined()) {
    check(options.x_bias.dtype() == x.dtype(), "add_layer_norm: expected x_bias of x's {}, got {}", x.dtype(),
          options.x_bias.dtype());
  }
  check(options.p >= 0 && options.p < 1, "add_layer_norm: expected p in [0, 1), got {}", options.p);
  check(options.eps >= 0, "add_layer_norm: expected eps of at least 0, got {}", options.eps);

  ElementDropout dropout;
  if (options.training && options.p > 0) {
    dropout = {.key = next_philox_key(), .threshold = ElementDropout::threshold_of(options.p)};
  }
  const Tensor& parameter = weight.defined() ? weight : bias;
  const auto [sum, y] =
      autograd::apply(AddLayerNorm{.rows = numel_of(x.shape().slice(0, leading)),
                                   .columns = numel_of(normalized_shape),
                                   .dropout = dropout,
                                   .eps = options.eps,
                                   .row_shape = normalized_shape,
                                   .weight_dtype = parameter.defined() ? parameter.dtype() : x.dtype()},
                      x, residual, weight, bias, options.x_bias);
  return {.sum = sum, .y = y};
}

}  // namespace mica
