#include <mica/autograd/function.h>
#include <mica/core/channels_last.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/elementwise/where.h>

namespace mica {

namespace {

using autograd::Context;

Shape shape_with_condition(const Tensor& condition, const Shape& shape, Device device, const char* op) {
  check(condition.dtype() == boolean, "{}: expected a condition of bool, got {}", op, condition.dtype());
  check(condition.device() == device, "{}: expected tensors on one device, got {} and {}", op, condition.device(),
        device);
  return condition.shape() == shape ? shape : broadcast_shapes(condition.shape(), shape, op);
}

Tensor select(const Tensor& condition, const Operand& a, const Operand& b, const Shape& shape, DType dtype) {
  const Tensor out = empty_in_layout(shape, dtype, condition.device(), {a.tensor, b.tensor});
  on_device(out.device(), [&](auto device) { kernels::where(device, out, condition, a, b); });
  return out;
}

struct Where {
  static constexpr bool composed = true;
  Shape shape_a{}, shape_b{};

  Tensor forward(Context& ctx, const Tensor& condition, const Tensor& a, const Tensor& b) {
    const Shape values = detail::common_shape(a, b, "where");
    const Shape shape = shape_with_condition(condition, values, a.device(), "where");
    ctx.save_for_backward(condition);
    shape_a = a.shape();
    shape_b = b.shape();
    return select(condition, a, b, shape, a.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    const auto [condition] = ctx.saved<1>();
    return {Tensor{}, ctx.needs_grad(1) ? detail::unbroadcast(where(condition, dy, 0), shape_a) : Tensor{},
            ctx.needs_grad(2) ? detail::unbroadcast(where(condition, 0, dy), shape_b) : Tensor{}};
  }
};

// y = `number` where the condition equals `when`, else x.
struct WhereNumber {
  static constexpr bool composed = true;
  double number;
  bool when;
  Shape shape{};

  Tensor forward(Context& ctx, const Tensor& condition, const Tensor& x) {
    detail::check_number(number, x.dtype(), "where");
    const Shape out = shape_with_condition(condition, x.shape(), x.device(), "where");
    ctx.save_for_backward(condition);
    shape = x.shape();
    const Operand value = detail::rounded(number, x.dtype());
    return select(condition, when ? value : Operand(x), when ? Operand(x) : value, out, x.dtype());
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    const auto [condition] = ctx.saved<1>();
    return {Tensor{}, detail::unbroadcast(when ? where(condition, 0, dy) : where(condition, dy, 0), shape)};
  }
};

}  // namespace

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return autograd::apply(Where{}, condition, a, b);
}
Tensor where(const Tensor& condition, const Tensor& a, double b) {
  return autograd::apply(WhereNumber{.number = b, .when = false}, condition, a);
}
Tensor where(const Tensor& condition, double a, const Tensor& b) {
  return autograd::apply(WhereNumber{.number = a, .when = true}, condition, b);
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, double value) {
  check(shape_with_condition(mask, x.shape(), x.device(), "masked_fill") == x.shape(),
        "masked_fill: expected a mask that broadcasts to {}, got {}", x.shape(), mask.shape());
  return where(mask, value, x);
}

}  // namespace mica
