#include <array>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/norm/detail/norm_ops.h>
#include <mica/ops/norm/detail/rms_norm_kernels.h>
#include <mica/ops/norm/rms_norm.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

using norm::contiguous_or_absent;

namespace {

// Rows of so many columns.
struct RMSNormRows {
  std::int64_t rows;
  std::int64_t columns;
  double eps;
};

// (dx, dweight) by the fused kernels, those that are not wanted undefined. rstd is x's, not an argument of its own.
// README.md derives what its backward computes.
struct RMSNormGradient {
  static constexpr bool composed = true;
  RMSNormRows size;
  Shape row_shape;
  DType weight_dtype;
  std::array<bool, 2> wanted;

  Tensors forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& weight,
                  const Tensor& rstd) const {
    ctx.set_materialize_grads(false);
    ctx.save_for_backward(dy, x, weight, rstd);
    const Tensor dx = wanted[0] ? empty(dy.shape(), dy.dtype(), dy.device()) : Tensor{};
    const Tensor dweight = wanted[1] ? empty(row_shape, weight_dtype, dy.device()) : Tensor{};
    if (x.numel() > 0) {
      const Tensor dy_rows = contiguous_data(dy);
      const Tensor x_rows = contiguous_data(x);
      const Tensor weight_row = contiguous_or_absent(weight);
      const kernels::RMSNormBackward args{.rows = size.rows,
                                          .columns = size.columns,
                                          .dy = dy_rows,
                                          .x = x_rows,
                                          .weight = weight_row,
                                          .rstd = rstd,
                                          .dx = dx,
                                          .dweight = dweight};
      on_device(dy.device(), [&](auto device) { kernels::rms_norm_backward(device, args); });
    } else if (dweight.defined()) {
      fill_data(dweight, 0);
    }
    return {dx, dweight};
  }

  // a, b: the gradients of dx and dweight, undefined where none came.
  Tensors backward(autograd::Context& ctx, const Tensor& a, const Tensor& b) const {
    const auto [dy, x, weight, rstd] = ctx.saved<4>();
    const norm::Normalization parts{
        .normalize = [&](const Tensor& x) { return rms_norm(x, {size.columns}, {}, size.eps); },
        .project =
            [&, &rstd = rstd](const Tensor& v, const Tensor& x) {
              const RMSNormGradient dx_only{
                  .size = size, .row_shape = {size.columns}, .weight_dtype = x.dtype(), .wanted = {true, false}};
              return autograd::apply(dx_only, v, x, Tensor{}, rstd)[0];
            },
        .rstd = [&](const Tensor& x) { return rsqrt(mean(x * x, {1}, true) + size.eps); }};
    const norm::Gradients g = norm::second_derivative(ctx, parts, size.columns, dy, x, weight, a, b, Tensor{});
    return {g.dy, g.x, g.weight, Tensor{}};
  }
};

struct RMSNorm {
  static constexpr bool composed = true;
  RMSNormRows size;
  Shape row_shape;
  DType weight_dtype;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight) const {
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    if (y.numel() == 0) {
      ctx.save_for_backward(x, weight, Tensor{});
      return y;
    }
    const Tensor x_rows = contiguous_data(x);
    const Tensor weight_row = contiguous_or_absent(weight);
    const Tensor rstd = ctx.needs_any_grad() ? empty({size.rows}, accumulate_dtype(x.dtype()), x.device()) : Tensor{};
    const kernels::RMSNormForward args{.rows = size.rows,
                                       .columns = size.columns,
                                       .x = x_rows,
                                       .weight = weight_row,
                                       .eps = size.eps,
                                       .y = y,
                                       .rstd = rstd};
    on_device(x.device(), [&](auto device) { kernels::rms_norm_forward(device, args); });
    ctx.save_for_backward(x, weight, rstd);
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, weight, rstd] = ctx.saved<3>();
    const RMSNormGradient gradient{.size = size,
                                   .row_shape = row_shape,
                                   .weight_dtype = weight_dtype,
                                   .wanted = {ctx.needs_grad(0), ctx.needs_grad(1)}};
    return autograd::apply(gradient, dy, x, weight, rstd);
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, double eps) {
  if (autograd::autocast_widens(x)) {
    return rms_norm(autograd::widened(x), normalized_shape, autograd::widened(weight), eps);
  }
  const int leading = norm::check_normalized("rms_norm", x, normalized_shape);
  norm::check_parameter("rms_norm", "weight", weight, x, normalized_shape);
  check(eps >= 0, "rms_norm: expected eps of at least 0, got {}", eps);
  return autograd::apply(
      RMSNorm{
          .size = {.rows = numel_of(x.shape().slice(0, leading)), .columns = numel_of(normalized_shape), .eps = eps},
          .row_shape = normalized_shape,
          .weight_dtype = weight.defined() ? weight.dtype() : x.dtype()},
      x, weight);
}

}  // namespace mica
