#include <array>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/rms_norm/rms_norm.h>
#include <mica/ops/rms_norm/rms_norm_kernels.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// Rows of so many columns.
struct Rows {
  std::int64_t rows;
  std::int64_t columns;
  double eps;
};

Tensor contiguous_or_absent(const Tensor& x) { return x.defined() ? contiguous_data(x) : x; }

// (dx, dweight) by the fused kernels, those that are not wanted undefined. rstd is x's, not an argument of its own.
// README.md derives what its backward computes.
struct RMSNormGradient {
  static constexpr bool composed = true;
  Rows size;
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
    Tensors gradients(4);
    if (x.numel() == 0) {
      const std::array<Tensor, 3> arguments{dy, x, weight};
      for (int i = 0; i < 3; ++i) {
        gradients[i] = ctx.needs_grad(i) ? zeros_like(arguments[i]) : Tensor{};
      }
      return gradients;
    }
    const DType sums = accumulate_dtype(x.dtype());
    const auto matrix_of = [&](const Tensor& t) { return reshape(t.to(sums), {size.rows, size.columns}); };
    const auto row_of = [&](const Tensor& t) { return reshape(t.to(sums), {size.columns}); };
    const auto row_mean = [](const Tensor& t) { return mica::mean(t, {1}, true); };
    const auto weighted = [&, &weight = weight](const Tensor& t) { return weight.defined() ? t * row_of(weight) : t; };
    const Tensor xs = matrix_of(x);
    const Tensor dys = matrix_of(dy);
    const Tensor x_hat = rms_norm(xs, {size.columns}, {}, size.eps);
    // R(v) = rstd · (v − x̂ ⟨v x̂⟩): the kernel for dx, without a weight.
    const auto project = [&, &rstd = rstd](const Tensor& v) {
      const RMSNormGradient dx_only{
          .size = size, .row_shape = {size.columns}, .weight_dtype = sums, .wanted = {true, false}};
      return autograd::apply(dx_only, v, xs, Tensor{}, rstd)[0];
    };

    // In `sums` and by rows, as README.md names them.
    Tensor ddy;
    Tensor dx;
    Tensor h;
    const auto add_to = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; };
    if (a.defined()) {
      const Tensor as = matrix_of(a);
      const Tensor projected = project(as);
      const Tensor g = weighted(dys);
      if (ctx.needs_grad(0)) {
        add_to(ddy, weighted(projected));
      }
      if (ctx.needs_grad(1)) {
        const Tensor minus_r = neg(rsqrt(row_mean(xs * xs) + size.eps));
        h = as * (minus_r * row_mean(g * x_hat)) + g * (minus_r * row_mean(as * x_hat));
        dx = x_hat * (minus_r * row_mean(g * projected));
      }
      if (ctx.needs_grad(2)) {
        gradients[2] = reshape(sum(dys * projected, {0}).to(weight.dtype()), weight.shape());
      }
    }
    if (b.defined()) {
      if (ctx.needs_grad(0)) {
        add_to(ddy, x_hat * row_of(b));
      }
      if (ctx.needs_grad(1)) {
        add_to(h, dys * row_of(b));
      }
    }
    if (h.defined()) {
      add_to(dx, project(h));
    }
    const auto like = [](const Tensor& t, const Tensor& x) { return reshape(t.to(x.dtype()), x.shape()); };
    gradients[0] = ddy.defined() ? like(ddy, dy) : Tensor{};
    gradients[1] = dx.defined() ? like(dx, x) : Tensor{};
    return gradients;
  }
};

struct RMSNorm {
  static constexpr bool composed = true;
  Rows size;
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

void check_weight(const Tensor& weight, const Tensor& x, const Shape& normalized_shape) {
  check(weight.shape() == normalized_shape, "rms_norm: expected weight of shape {}, got {}", normalized_shape,
        weight.shape());
  const DType sums = accumulate_dtype(x.dtype());
  check(weight.dtype() == x.dtype() || weight.dtype() == sums, "rms_norm: expected weight of {}{}{}, got {}", x.dtype(),
        sums == x.dtype() ? "" : " or ", sums == x.dtype() ? "" : name_of(sums), weight.dtype());
  check(weight.device() == x.device(), "rms_norm: expected weight on {}, got it on {}", x.device(), weight.device());
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, double eps) {
  check(x.defined(), "rms_norm: expected a defined x, got an undefined one");
  check(is_floating(x.dtype()), "rms_norm: expected x of a floating dtype, got {}", x.dtype());
  check(!normalized_shape.empty(), "rms_norm: expected normalized_shape of at least one axis, got []");
  const int leading = x.dim() - normalized_shape.size();
  check(leading >= 0 && x.shape().slice(leading) == normalized_shape,
        "rms_norm: expected x of a shape that ends in {}, got {}", normalized_shape, x.shape());
  if (weight.defined()) {
    check_weight(weight, x, normalized_shape);
  }
  check(eps >= 0, "rms_norm: expected eps of at least 0, got {}", eps);
  return autograd::apply(
      RMSNorm{
          .size = {.rows = numel_of(x.shape().slice(0, leading)), .columns = numel_of(normalized_shape), .eps = eps},
          .row_shape = normalized_shape,
          .weight_dtype = weight.defined() ? weight.dtype() : x.dtype()},
      x, weight);
}

}  // namespace mica
