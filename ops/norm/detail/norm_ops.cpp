#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/norm/detail/norm_ops.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::norm {

Tensor contiguous_or_absent(const Tensor& x) { return x.defined() ? contiguous_data(x) : x; }

int check_normalized(const char* op, const Tensor& x, const Shape& normalized_shape) {
  check(x.defined(), "{}: expected a defined x, got an undefined one", op);
  check(is_floating(x.dtype()), "{}: expected x of a floating dtype, got {}", op, x.dtype());
  check(!normalized_shape.empty(), "{}: expected normalized_shape of at least one axis, got []", op);
  const int leading = x.dim() - normalized_shape.size();
  check(leading >= 0 && x.shape().slice(leading) == normalized_shape,
        "{}: expected x of a shape that ends in {}, got {}", op, normalized_shape, x.shape());
  return leading;
}

void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& x,
                     const Shape& normalized_shape) {
  if (!parameter.defined()) {
    return;
  }
  check(parameter.shape() == normalized_shape, "{}: expected {} of shape {}, got {}", op, name, normalized_shape,
        parameter.shape());
  const DType sums = accumulate_dtype(x.dtype());
  check(parameter.dtype() == x.dtype() || parameter.dtype() == sums, "{}: expected {} of {}{}{}, got {}", op, name,
        x.dtype(), sums == x.dtype() ? "" : " or ", sums == x.dtype() ? "" : name_of(sums), parameter.dtype());
  check(parameter.device() == x.device(), "{}: expected {} on {}, got it on {}", op, name, x.device(),
        parameter.device());
}

Gradients second_derivative(const autograd::Context& ctx, const Normalization& norm, std::int64_t columns,
                            const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& a, const Tensor& b,
                            const Tensor& c) {
  if (x.numel() == 0) {
    const auto zeros = [&](int i, const Tensor& t) { return ctx.needs_grad(i) ? zeros_like(t) : Tensor{}; };
    return {zeros(0, dy), zeros(1, x), zeros(2, weight)};
  }
  const std::int64_t rows = x.numel() / columns;
  const DType sums = accumulate_dtype(x.dtype());
  const auto matrix_of = [&](const Tensor& t) { return reshape(t.to(sums), {rows, columns}); };
  const auto row_of = [&](const Tensor& t) { return reshape(t.to(sums), {columns}); };
  const auto times_weight = [&](const Tensor& t) { return weight.defined() ? t * row_of(weight) : t; };
  const auto row_mean = [](const Tensor& t) { return mica::mean(t, {1}, true); };
  const Tensor xs = matrix_of(x);
  const Tensor dys = matrix_of(dy);
  const Tensor x_hat = norm.normalize(xs);

  // In `sums` and by rows.
  Tensor ddy;
  Tensor dx;
  Tensor dweight;
  Tensor h;
  const auto add_to = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; };
  if (a.defined()) {
    const Tensor as = matrix_of(a);
    const Tensor projected = norm.project(as, xs);
    const Tensor g = times_weight(dys);
    if (ctx.needs_grad(0)) {
      add_to(ddy, times_weight(projected));
    }
    if (ctx.needs_grad(1)) {
      const Tensor minus_r = neg(norm.rstd(xs));
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
    add_to(ddy, expand(row_of(c), {rows, columns}));
  }
  if (h.defined()) {
    add_to(dx, norm.project(h, xs));
  }
  const auto like = [](const Tensor& t, const Tensor& x) {
    return t.defined() ? reshape(t.to(x.dtype()), x.shape()) : Tensor{};
  };
  return {like(ddy, dy), like(dx, x), like(dweight, weight)};
}

}  // namespace mica::norm
