#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/norm/detail/norm_function.h>
#include <mica/ops/norm/detail/norm_gradient.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::norm {

Tensor contiguous_or_absent(const Tensor& x) { return x.defined() ? contiguous_data(x) : x; }

namespace {

// rstd as a function of x (rows, columns), of shape (rows, 1). Forward returns the known values; backward uses ∂rstd/∂x
// = −rstd² x̂ / columns.
struct RowScale {
  static constexpr bool composed = true;
  RowNorm norm;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& rstd) const {
    ctx.save_for_backward(x, rstd);
    return reshape(rstd.detach(), {norm.rows, 1});
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dr) const {
    const auto [x, rstd] = ctx.saved<2>();
    const Tensor r = autograd::apply(*this, x, rstd);
    const Tensor x_hat = autograd::apply(Norm{norm}, x, Tensor{}, Tensor{});
    return {x_hat * (dr * r * r * (-1.0 / static_cast<double>(norm.columns))), Tensor{}};
  }
};

Tensor row_mean(const Tensor& x) { return mean(x, {1}, true); }

}  // namespace

Tensors NormGradient::forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& weight,
                              const Tensor& mean, const Tensor& rstd) const {
  ctx.set_materialize_grads(false);
  ctx.save_for_backward(dy, x, weight, mean, rstd);
  const auto result = [&](int i, const Shape& shape, DType dtype) {
    return wanted[i] ? empty(shape, dtype, dy.device()) : Tensor{};
  };
  const Tensor dx = result(0, dy.shape(), dy.dtype());
  const Tensor dweight = result(1, norm.row_shape, norm.weight_dtype);
  const Tensor dbias = result(2, norm.row_shape, norm.weight_dtype);
  if (x.numel() == 0) {
    for (const Tensor& sum : {dweight, dbias}) {
      if (sum.defined()) {
        fill_data(sum, 0);
      }
    }
    return {dx, dweight, dbias};
  }
  const Tensor dy_rows = contiguous_data(dy);
  const Tensor x_rows = contiguous_data(x);
  const Tensor weight_row = contiguous_or_absent(weight);
  const kernels::NormBackward args{.rows = norm.rows,
                                   .columns = norm.columns,
                                   .centered = norm.centered,
                                   .dy = dy_rows,
                                   .x = x_rows,
                                   .weight = weight_row,
                                   .mean = mean,
                                   .rstd = rstd,
                                   .dx = dx,
                                   .dweight = dweight,
                                   .dbias = dbias};
  on_device(dy.device(), [&](auto device) { kernels::norm_backward(device, args); });
  return {dx, dweight, dbias};
}

// Recorded ops on matrices (rows, columns) in the dtype of x's sums. Only the results are rounded to the dtypes of dy,
// x and weight.
Tensors NormGradient::backward(autograd::Context& ctx, const Tensor& a, const Tensor& b, const Tensor& c) const {
  const auto [dy, x, weight, mean, rstd] = ctx.saved<5>();
  if (x.numel() == 0) {
    const auto zeros = [&](int i, const Tensor& t) { return ctx.needs_grad(i) ? zeros_like(t) : Tensor{}; };
    return {zeros(0, dy), zeros(1, x), zeros(2, weight), Tensor{}, Tensor{}};
  }
  const DType sums = accumulate_dtype(x.dtype());
  const auto matrix_of = [&](const Tensor& t) { return reshape(t.to(sums), {norm.rows, norm.columns}); };
  const auto row_of = [&](const Tensor& t) { return reshape(t.to(sums), {norm.columns}); };
  const auto times_weight = [&, &weight = weight](const Tensor& t) {
    return weight.defined() ? t * row_of(weight) : t;
  };
  RowNorm plain = norm;  // for such matrices, without weight and bias
  plain.row_shape = {norm.columns};
  plain.weight_dtype = sums;
  const Tensor xs = matrix_of(x);
  const Tensor dys = matrix_of(dy);
  const Tensor x_hat = autograd::apply(Norm{plain}, xs, Tensor{}, Tensor{});
  const auto project = [&, &mean = mean, &rstd = rstd](const Tensor& v) {  // R(v)
    return autograd::apply(NormGradient{plain, {true, false, false}}, v, xs, Tensor{}, mean, rstd)[0];
  };

  Tensor ddy;
  Tensor dx;
  Tensor dweight;
  Tensor h;
  const auto add_to = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; };
  if (a.defined()) {
    const Tensor as = matrix_of(a);
    const Tensor projected = project(as);
    const Tensor g = times_weight(dys);
    if (ctx.needs_grad(0)) {
      add_to(ddy, times_weight(projected));
    }
    if (ctx.needs_grad(1)) {
      const Tensor minus_r = neg(autograd::apply(RowScale{plain}, xs, rstd));
      h = as * (minus_r * row_mean(g * x_hat)) + g * (minus_r * row_mean(as * x_hat));
      dx = x_hat * (minus_r * row_mean(g * projected));
    }
    if (ctx.needs_grad(2)) {
      dweight = sum(dys * projected, {0});
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
  if (c.defined() && ctx.needs_grad(0)) {
    add_to(ddy, expand(row_of(c), {norm.rows, norm.columns}));
  }
  if (h.defined()) {
    add_to(dx, project(h));
  }
  const auto like = [](const Tensor& t, const Tensor& x) {
    return t.defined() ? reshape(t.to(x.dtype()), x.shape()) : Tensor{};
  };
  return {like(ddy, dy), like(dx, x), like(dweight, weight), Tensor{}, Tensor{}};
}

}  // namespace mica::norm
