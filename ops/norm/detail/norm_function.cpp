#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/dropout/detail/dropped.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/norm/detail/norm_forward.h>
#include <mica/ops/norm/detail/norm_function.h>
#include <mica/ops/norm/detail/norm_gradient.h>
#include <mica/ops/reduce/reduce.h>

namespace mica::norm {

namespace {

struct Statistics {
  Tensor mean;
  Tensor rstd;
};

// Allocates the statistics that backward needs. The others are undefined.
Statistics statistics_of(const autograd::Context& ctx, const RowNorm& norm, const Tensor& x) {
  if (!ctx.needs_any_grad()) {
    return {};
  }
  const DType sums = accumulate_dtype(x.dtype());
  return {.mean = norm.centered ? empty({kernels::mean_parts(x.dtype()), norm.rows}, sums, x.device()) : Tensor{},
          .rstd = empty({norm.rows}, sums, x.device())};
}

// The kernel's arguments for a norm without a residual.
kernels::NormForward arguments_of(const RowNorm& norm, const Tensor& x, const Tensor& weight, const Tensor& bias,
                                  const Tensor& y, const Statistics& statistics) {
  return {.rows = norm.rows,
          .columns = norm.columns,
          .centered = norm.centered,
          .eps = norm.eps,
          .x = x,
          .weight = weight,
          .bias = bias,
          .y = y,
          .mean = statistics.mean,
          .rstd = statistics.rstd};
}

// Computes sum = residual + dropped(x + x_bias) by kernels of other ops.
void add_in_steps(const kernels::NormForward& a) {
  const Tensor addend = a.x_bias.defined() || a.dropout.drops() ? empty_like(a.x) : a.x;
  const auto add = [](const Tensor& to, const Tensor& x, const Tensor& y) {
    on_device(x.device(), [&](auto device) { kernels::binary(device, functions::Add{}, to, x, y); });
  };
  if (a.x_bias.defined()) {
    add(addend, a.x, a.x_bias);
  }
  if (a.dropout.drops()) {
    detail::write_dropped(addend, a.x_bias.defined() ? addend : a.x, a.dropout);
  }
  add(a.sum, a.residual, addend);
}

}  // namespace

Tensor Norm::forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) const {
  const Tensor y = empty(x.shape(), x.dtype(), x.device());
  if (y.numel() == 0) {
    ctx.save_for_backward(x, weight, Tensor{}, Tensor{});
    return y;
  }
  const Tensor x_rows = contiguous_data(x);
  const Tensor weight_row = contiguous_or_absent(weight);
  const Tensor bias_row = contiguous_or_absent(bias);
  const Statistics statistics = statistics_of(ctx, norm, x);
  const kernels::NormForward args = arguments_of(norm, x_rows, weight_row, bias_row, y, statistics);
  on_device(x.device(), [&](auto device) { kernels::norm_forward(device, args); });
  ctx.save_for_backward(x, weight, statistics.mean, statistics.rstd);
  return y;
}

Tensors Norm::backward(autograd::Context& ctx, const Tensor& dy) const {
  const auto [x, weight, mean, rstd] = ctx.saved<4>();
  const NormGradient gradient{norm, {ctx.needs_grad(0), ctx.needs_grad(1), ctx.needs_grad(2)}};
  return autograd::apply(gradient, dy, x, weight, mean, rstd);
}

std::array<Tensor, 2> AddNorm::forward(autograd::Context& ctx, const Tensor& x, const Tensor& residual,
                                       const Tensor& weight, const Tensor& bias, const Tensor& x_bias) const {
  ctx.set_materialize_grads(false);
  const Tensor sum = empty(x.shape(), x.dtype(), x.device());
  const Tensor y = empty_like(sum);
  if (y.numel() == 0) {
    ctx.save_for_backward(sum, weight, Tensor{}, Tensor{});
    return {sum, y};
  }
  const Tensor x_rows = contiguous_data(x);
  const Tensor residual_rows = contiguous_data(residual);
  const Tensor weight_row = contiguous_or_absent(weight);
  const Tensor bias_row = contiguous_or_absent(bias);
  const Tensor x_bias_row = contiguous_or_absent(x_bias);
  const Statistics statistics = statistics_of(ctx, norm, x);
  const kernels::NormForward args{.rows = norm.rows,
                                  .columns = norm.columns,
                                  .centered = norm.centered,
                                  .eps = norm.eps,
                                  .x = x_rows,
                                  .weight = weight_row,
                                  .bias = bias_row,
                                  .y = y,
                                  .mean = statistics.mean,
                                  .rstd = statistics.rstd,
                                  .residual = residual_rows,
                                  .x_bias = x_bias_row,
                                  .dropout = dropout,
                                  .sum = sum};
  on_device(x.device(), [&](auto device) {
    if (kernels::add_norm_forward(device, args)) {
      return;
    }
    add_in_steps(args);
    kernels::norm_forward(device, arguments_of(norm, sum, weight_row, bias_row, y, statistics));
  });
  ctx.save_for_backward(sum, weight, statistics.mean, statistics.rstd);
  return {sum, y};
}

Tensors AddNorm::backward(autograd::Context& ctx, const Tensor& dsum, const Tensor& dy) const {
  const std::array<Tensor, 4> saved = ctx.saved<4>();
  const auto& [sum, weight, mean, rstd] = saved;
  if (dsum.defined() && dy.defined() && !autograd::grad_enabled() && sum.numel() > 0) {
    Tensors gradients = backward_in_one_pass(ctx, saved, dsum, dy);
    if (!gradients.empty()) {
      return gradients;
    }
  }
  Tensors d(3);  // the gradients of sum (through the norm), weight and bias
  if (dy.defined()) {
    const NormGradient gradient{
        norm, {ctx.needs_grad(0) || ctx.needs_grad(1) || ctx.needs_grad(4), ctx.needs_grad(2), ctx.needs_grad(3)}};
    d = autograd::apply(gradient, dy, sum, weight, mean, rstd);
  }
  const Tensor dresidual = !d[0].defined() ? dsum : !dsum.defined() ? d[0] : d[0] + dsum;
  Tensor dx;
  if ((ctx.needs_grad(0) || ctx.needs_grad(4)) && dresidual.defined()) {
    dx = dropout.drops() && dresidual.numel() > 0 ? detail::dropped(dresidual, dropout) : dresidual;
  }
  return {ctx.needs_grad(0) ? dx : Tensor{}, ctx.needs_grad(1) ? dresidual : Tensor{}, d[1], d[2],
          ctx.needs_grad(4) && dx.defined() ? sum_to(dx, norm.row_shape) : Tensor{}};
}

Tensors AddNorm::backward_in_one_pass(const autograd::Context& ctx, const std::array<Tensor, 4>& saved,
                                      const Tensor& dsum, const Tensor& dy) const {
  if (dy.device().is_cpu()) {
    return {};
  }
  const auto& [sum, weight, mean, rstd] = saved;
  const bool other_dx = dropout.drops();  // whether dx differs from dresidual
  const bool wants_dx = ctx.needs_grad(0) || ctx.needs_grad(4);
  const auto matrix = [&, &sum = sum](bool wanted) { return wanted ? empty_like(sum) : Tensor{}; };
  const auto row = [&](bool wanted, DType dtype) {
    return wanted ? empty(norm.row_shape, dtype, dy.device()) : Tensor{};
  };
  const Tensor dresidual = matrix(ctx.needs_grad(1) || (wants_dx && !other_dx));
  const Tensor dx = matrix(wants_dx && other_dx);
  const Tensor dweight = row(ctx.needs_grad(2), norm.weight_dtype);
  const Tensor dbias = row(ctx.needs_grad(3), norm.weight_dtype);
  const bool sums_dx = ctx.needs_grad(4) && kernels::add_norm_sums_dx(dy.dtype(), norm.columns);
  Tensor dx_bias = row(sums_dx, dy.dtype());
  const Tensor dsum_rows = contiguous_data(dsum);
  const Tensor dy_rows = contiguous_data(dy);
  const Tensor weight_row = contiguous_or_absent(weight);
  const kernels::NormBackward args{.rows = norm.rows,
                                   .columns = norm.columns,
                                   .centered = norm.centered,
                                   .dy = dy_rows,
                                   .x = sum,
                                   .weight = weight_row,
                                   .mean = mean,
                                   .rstd = rstd,
                                   .dx = dresidual,
                                   .dweight = dweight,
                                   .dbias = dbias,
                                   .dsum = dsum_rows,
                                   .dropout = dropout,
                                   .dx_dropped = dx,
                                   .dx_bias = dx_bias};
  if (!on_device(dy.device(), [&](auto device) { return kernels::add_norm_backward(device, args); })) {
    return {};
  }
  const Tensor& of_x = other_dx ? dx : dresidual;
  if (ctx.needs_grad(4) && !sums_dx) {
    dx_bias = sum_to(of_x, norm.row_shape);
  }
  return {ctx.needs_grad(0) ? of_x : Tensor{}, ctx.needs_grad(1) ? dresidual : Tensor{}, dweight, dbias, dx_bias};
}

ElementDropout draw_dropout(double p, bool training) {
  if (!training || p == 0) {
    return {};
  }
  return {.key = next_philox_key(), .threshold = ElementDropout::threshold_of(p)};
}

}  // namespace mica::norm
