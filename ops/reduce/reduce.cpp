#include <algorithm>
#include <cmath>
#include <limits>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/detail/reduce_kernels.h>
#include <mica/ops/reduce/detail/shapes.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using reduction::reduced_shapes;
using reduction::Shapes;
using reduction::sum_over;
using reduction::viewed_as;

void check_floating(const Tensor& x, const char* op) {
  check(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", op, x.dtype());
}

Tensor kept_of(const Tensor& dy, const Shapes& shapes) { return viewed_as(contiguous_data(dy), shapes.kept); }

/// Scratch, and results used by backward only; reduced axes have length 1.
Tensor statistic_of(const Tensor& x, const Shapes& shapes) {
  return empty(shapes.kept, accumulate_dtype(x.dtype()), x.device());
}

// The gradient at dy = 1. Since gradients are linear in dy, the derivative with respect to dy is this times ddx,
// summed.
template <class Gradient, class... Saved>
Tensor slope(const Gradient& gradient, const Tensor& ddx, const Saved&... saved) {
  return autograd::apply(gradient, ones(gradient.shapes.result, ddx.dtype(), ddx.device()), saved...);
}

// dx = dy · 2 (x − mean) / divisor, with x's own mean.
struct VarGradient {
  static constexpr bool composed = true;
  Shapes shapes;
  double divisor;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& first,
                 const Tensor& offset) const {
    const Tensor dx = empty_like(x);
    const Tensor kept = kept_of(dy, shapes);
    const kernels::VarBackward args{.x = x, .first = first, .offset = offset, .dy = kept, .divisor = divisor, .dx = dx};
    on_device(x.device(), [&](auto device) { kernels::var_backward(device, args); });
    ctx.save_for_backward(dy, x, first, offset);
    return dx;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [dy, x, first, offset] = ctx.saved<4>();
    Tensors gradients(4);
    if (ctx.needs_grad(0)) {
      gradients[0] = sum_over(ddx * slope(*this, ddx, x, first, offset), shapes);
    }
    if (ctx.needs_grad(1)) {
      const Shapes kept{.kept = shapes.kept, .result = shapes.kept, .count = shapes.count};
      const Tensor centered = ddx - reduction::mean_over(ddx, kept);
      gradients[1] = centered * reshape(dy, shapes.kept) * (2 / divisor);
    }
    return gradients;
  }
};

struct Var {
  static constexpr bool composed = true;
  Shapes shapes;
  double divisor;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor offset = statistic_of(x, shapes);
    const Tensor y = empty(shapes.result, x.dtype(), x.device());
    const Tensor kept = viewed_as(y, shapes.kept);
    const Tensor first = empty(shapes.kept, x.dtype(), x.device());
    copy_into(first,
              shapes.count > 0 ? as_strided(x, shapes.kept, x.strides(), x.handle()->offset) : full_like(first, 0));
    const auto count = static_cast<double>(shapes.count);
    const kernels::Var args{.x = x, .count = count, .divisor = divisor, .first = first, .offset = offset, .y = kept};
    on_device(x.device(), [&](auto device) { kernels::var(device, args); });
    ctx.save_for_backward(x, first, offset);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, first, offset] = ctx.saved<3>();
    return autograd::apply(VarGradient{shapes, divisor}, dy, x, first, offset);
  }
};

// dx = dy · exp(x − y)
struct LogSumExpGradient {
  static constexpr bool composed = true;
  Shapes shapes;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& y) const {
    const Tensor dx = empty_like(x);
    const Tensor kept = kept_of(y, shapes);
    const Tensor dkept = kept_of(dy, shapes);
    const kernels::LogSumExpBackward args{.x = x, .y = kept, .dy = dkept, .dx = dx};
    on_device(x.device(), [&](auto device) { kernels::logsumexp_backward(device, args); });
    ctx.save_for_backward(dy, x, y);
    return dx;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [dy, x, y] = ctx.saved<3>();
    const Tensor t = ddx * slope(*this, ddx, x, y);
    const Tensor sums = sum_over(t, shapes);
    return {ctx.needs_grad(0) ? sums : Tensor{}, ctx.needs_grad(1) ? t * reshape(dy, shapes.kept) : Tensor{},
            ctx.needs_grad(2) ? neg(sums * dy) : Tensor{}};
  }
};

struct LogSumExp {
  static constexpr bool composed = true;
  Shapes shapes;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor largest = statistic_of(x, shapes);
    const Tensor y = empty(shapes.result, x.dtype(), x.device());
    const Tensor kept = viewed_as(y, shapes.kept);
    const kernels::LogSumExp args{.x = x, .largest = largest, .y = kept};
    on_device(x.device(), [&](auto device) { kernels::logsumexp(device, args); });
    ctx.save_for_backward(x, y);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, y] = ctx.saved<2>();
    return autograd::apply(LogSumExpGradient{shapes}, dy, x, y);
  }
};

// dx = dy where x is the extreme, divided evenly among equal elements.
struct ExtremeGradient {
  static constexpr bool composed = true;
  Shapes shapes;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& y) const {
    const Tensor dx = empty_like(x);
    const Tensor count = statistic_of(x, shapes);
    const Tensor values = kept_of(y, shapes);
    const Tensor dkept = kept_of(dy, shapes);
    const kernels::ExtremeBackward args{.x = x, .values = values, .dy = dkept, .count = count, .dx = dx};
    on_device(x.device(), [&](auto device) { kernels::extreme_backward(device, args); });
    ctx.save_for_backward(x, y);
    return dx;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [x, y] = ctx.saved<2>();
    return {ctx.needs_grad(0) ? sum_over(ddx * slope(*this, ddx, x, y), shapes) : Tensor{},
            ctx.needs_grad(1) ? zeros_like(x) : Tensor{}, ctx.needs_grad(2) ? zeros_like(y) : Tensor{}};
  }
};

/// The extreme over some axes.
struct Extreme {
  static constexpr bool composed = true;
  Shapes shapes;
  bool largest;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor y = empty(shapes.result, x.dtype(), x.device());
    const Tensor values = viewed_as(y, shapes.kept);
    const kernels::Extreme args{.x = x, .largest = largest, .values = values, .indices = {}};
    on_device(x.device(), [&](auto device) { kernels::extreme(device, args); });
    ctx.save_for_backward(x, y);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, y] = ctx.saved<2>();
    return autograd::apply(ExtremeGradient{shapes}, dy, x, y);
  }
};

/// dy at the positions `where` along an axis, 0 elsewhere.
struct ScatterAlongAxis {
  static constexpr bool composed = true;
  Shape in;
  Shapes shapes;
  int axis;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& where) const {
    const Tensor dx = empty(in, dy.dtype(), dy.device());
    Shape line = Shape::filled(in.size(), 1);
    line[axis] = in[axis];
    const Tensor positions = viewed_as(arange(0, static_cast<double>(in[axis]), 1, int64, dy.device()), line);
    const Tensor indices = kept_of(where, shapes);
    const Tensor dkept = kept_of(dy, shapes);
    const kernels::ScatterAlongAxis args{.positions = positions, .indices = indices, .dy = dkept, .dx = dx};
    on_device(dy.device(), [&](auto device) { kernels::scatter_along_axis(device, args); });
    ctx.save_for_backward(where);
    return dx;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    return {sum_over(ddx * slope(*this, ddx, ctx.saved<1>()[0]), shapes), Tensor{}};
  }
};

/// The extreme along one axis, and its position.
struct ExtremeAlongAxis {
  static constexpr bool composed = true;
  Shape in;
  Shapes shapes;
  int axis;
  bool largest;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor y = empty(shapes.result, x.dtype(), x.device());
    const Tensor where = empty(shapes.result, int64, x.device());
    const Tensor values = viewed_as(y, shapes.kept);
    const Tensor indices = viewed_as(where, shapes.kept);
    const kernels::Extreme args{.x = x, .largest = largest, .values = values, .indices = indices};
    on_device(x.device(), [&](auto device) { kernels::extreme(device, args); });
    ctx.save_for_backward(where);
    return {y, where};
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy, const Tensor&) const {
    return autograd::apply(ScatterAlongAxis{in, shapes, axis}, dy, ctx.saved<1>()[0]);
  }
};

Tensor extreme(const Tensor& x, const Dims& axes, bool keepdim, bool largest, const char* op) {
  check(x.dtype() != boolean, "{}: expected a numeric dtype, got {}", op, x.dtype());
  const Shapes shapes = reduced_shapes(x, axes, keepdim, op);
  check(shapes.count > 0, "{}: expected at least one element, got shape {} and axes {}", op, x.shape(), axes);
  return autograd::apply(Extreme{shapes, largest}, x);
}

MaxResult extreme_along(const Tensor& x, std::int64_t axis, bool keepdim, bool largest, const char* op) {
  const int i = normalize_axis(axis, x.dim(), op);
  check(x.shape()[i] > 0, "{}: expected an axis with elements, got axis {} of shape {}", op, axis, x.shape());
  check(x.dtype() != boolean, "{}: expected a numeric dtype, got {}", op, x.dtype());
  const Shapes shapes = reduced_shapes(x, {i}, keepdim, op);
  const auto results = autograd::apply(ExtremeAlongAxis{x.shape(), shapes, i, largest}, x);
  return {.values = results[0], .indices = results[1]};
}

}  // namespace

Tensor var(const Tensor& x, const Dims& axes, double correction, bool keepdim) {
  check_floating(x, "var");
  const Shapes shapes = reduced_shapes(x, axes, keepdim, "var");
  const double divisor = std::max(static_cast<double>(shapes.count) - correction, 0.0);
  return autograd::apply(Var{shapes, divisor}, x);
}

namespace {

/// xᵖ for p ≠ 0, with derivative 0 where x is 0.
Tensor power(const Tensor& x, double p) {
  const Tensor zero = eq(x, 0);
  const Tensor others = where(zero, 1, x);
  return where(zero, p < 0 ? std::numeric_limits<double>::infinity() : 0, p == 0.5 ? sqrt(others) : pow(others, p));
}

}  // namespace

Tensor stddev(const Tensor& x, const Dims& axes, double correction, bool keepdim) {
  check_floating(x, "stddev");
  return power(var(x, axes, correction, keepdim), 0.5);
}

Tensor vector_norm(const Tensor& x, const Dims& axes, double p, bool keepdim) {
  check_floating(x, "vector_norm");
  check(!std::isnan(p), "vector_norm: expected a number p, got NaN");
  if (size_of(x.dtype()) == 2) {
    return vector_norm(x.to(float32), axes, p, keepdim).to(x.dtype());
  }
  if (p == 0) {
    return sum(where(eq(x, 0), 0, pow(x, 0)), axes, keepdim);
  }
  if (p == 2) {
    return power(sum(pow(x, 2), axes, keepdim), 0.5);
  }
  const Tensor sizes = abs(x);
  if (std::isinf(p)) {
    return p > 0 ? amax(sizes, axes, keepdim) : amin(sizes, axes, keepdim);
  }
  if (p == 1) {
    return sum(sizes, axes, keepdim);
  }
  return power(sum(power(sizes, p), axes, keepdim), 1 / p);
}

Tensor logsumexp(const Tensor& x, const Dims& axes, bool keepdim) {
  if (autograd::autocast_widens(x)) {
    return logsumexp(autograd::widened(x), axes, keepdim);
  }
  check_floating(x, "logsumexp");
  return autograd::apply(LogSumExp{reduced_shapes(x, axes, keepdim, "logsumexp")}, x);
}

Tensor max(const Tensor& x) { return extreme(x, {}, false, true, "max"); }

Tensor min(const Tensor& x) { return extreme(x, {}, false, false, "min"); }

Tensor amax(const Tensor& x, const Dims& axes, bool keepdim) { return extreme(x, axes, keepdim, true, "amax"); }

Tensor amin(const Tensor& x, const Dims& axes, bool keepdim) { return extreme(x, axes, keepdim, false, "amin"); }

MaxResult max(const Tensor& x, std::int64_t axis, bool keepdim) { return extreme_along(x, axis, keepdim, true, "max"); }

MaxResult min(const Tensor& x, std::int64_t axis, bool keepdim) {
  return extreme_along(x, axis, keepdim, false, "min");
}

Tensor argmax(const Tensor& x) {
  check(x.numel() > 0, "argmax: expected at least one element, got shape {}", x.shape());
  return no_grad([&] { return argmax(flatten(x), 0); });
}

Tensor argmin(const Tensor& x) {
  check(x.numel() > 0, "argmin: expected at least one element, got shape {}", x.shape());
  return no_grad([&] { return argmin(flatten(x), 0); });
}

Tensor argmax(const Tensor& x, std::int64_t axis, bool keepdim) {
  return no_grad([&] { return extreme_along(x, axis, keepdim, true, "argmax").indices; });
}

Tensor argmin(const Tensor& x, std::int64_t axis, bool keepdim) {
  return no_grad([&] { return extreme_along(x, axis, keepdim, false, "argmin").indices; });
}

Tensor prod(const Tensor& x, const Dims& axes, bool keepdim) {
  const Shapes shapes = reduced_shapes(x, axes, keepdim, "prod");
  // Moves the reduced axes to the end and merges them.
  Dims order, reduced;
  for (int i = 0; i < x.dim(); ++i) {
    const bool is_reduced = axes.empty() || std::any_of(axes.begin(), axes.end(),
                                                        [&](std::int64_t a) { return a == i || a + x.dim() == i; });
    (is_reduced ? reduced : order).push_back(i);
  }
  for (const std::int64_t axis : reduced) {
    order.push_back(axis);
  }
  const Tensor wide = x.to(is_floating(x.dtype()) ? accumulate_dtype(x.dtype()) : int64);
  std::int64_t n = shapes.count;
  const std::int64_t rows = numel_of(shapes.kept);
  if (n == 0 || rows == 0) {
    // An empty product is 1: an empty sum plus 1, which keeps the connection to x's history. If there are no results
    // (rows == 0), the sum has none, either.
    return (sum(wide, axes, keepdim) + 1).to(is_floating(x.dtype()) ? x.dtype() : int64);
  }
  Tensor product = reshape(permute(wide, order), {rows, n});
  while (n > 1) {
    const std::int64_t half = n / 2;
    const Tensor pairs = slice(product, 1, 0, half) * slice(product, 1, half, 2 * half);
    product = n % 2 == 0 ? pairs : cat({pairs, slice(product, 1, 2 * half, n)}, 1);
    n = n - half;
  }
  return reshape(product, shapes.result).to(is_floating(x.dtype()) ? x.dtype() : int64);
}

}  // namespace mica
