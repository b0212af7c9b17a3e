#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/inplace/detail/inplace_kernels.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

namespace {

using autograd::Context;

void check_target(const Tensor& x, const char* op) {
  autograd::check_writable(op, x);
  for (int axis = 0; axis < x.dim(); ++axis) {
    check(x.shape()[axis] <= 1 || x.strides()[axis] != 0,
          "{}: expected a target without overlapping elements, got shape {} and strides {}", op, x.shape(),
          x.strides());
  }
}

// y, or a copy of it if it shares memory with x, so that writing x could change elements of y before they are read.
Tensor readable(const Tensor& y, const Tensor& x) {
  const bool same_memory = y.handle()->storage == x.handle()->storage;
  const bool same_elements =
      y.handle()->offset == x.handle()->offset && y.shape() == x.shape() && y.strides() == x.strides();
  if (!same_memory || same_elements) {
    return y;
  }
  const Tensor copy = empty_like(y);
  copy_into(copy, y);
  return copy;
}

void check_source(const Tensor& x, const Tensor& y, const char* op) {
  check(detail::common_shape(x, y, op) == x.shape(), "{}: expected a source that broadcasts to {}, got {}", op,
        x.shape(), y.shape());
}

// A copy of `x`, with x's history, to save for backward the elements that are about to be overwritten.
Tensor snapshot(const Tensor& x) {
  const Tensor copy = empty_like(x);
  copy_into(copy, x);
  copy.handle()->slot = x.handle()->slot;
  return copy;
}

// The ops. Each forward writes its first input and returns a new handle to it, since a Function must not return one of
// its inputs. The gradient of that input is the gradient of its old elements.

struct Fill_ {
  static constexpr bool composed = true;
  double value;

  Tensor forward(Context&, const Tensor& x) const {
    fill_data(x, value);
    return x.detach();
  }
  Tensor backward(Context&, const Tensor& dy) const { return zeros_like(dy); }
};

struct Copy_ {
  static constexpr bool composed = true;
  Shape from{};
  DType dtype{};
  Device device{};

  Tensor forward(Context&, const Tensor& x, const Tensor& source) {
    from = source.shape();
    dtype = source.dtype();
    device = source.device();
    copy_into(x, broadcast_view(readable(source, x), x.shape()));
    return x.detach();
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    return {ctx.needs_grad(0) ? zeros_like(dy) : Tensor{},
            ctx.needs_grad(1) ? sum_to(dy, from).to(device, dtype) : Tensor{}};
  }
};

struct Add_ {
  static constexpr bool composed = true;
  double alpha;
  Shape from{};

  Tensor forward(Context&, const Tensor& x, const Tensor& y) {
    from = y.shape();
    const Tensor now = readable(y, x);
    on_device(x.device(), [&](auto device) { kernels::add_in_place(device, x, now, alpha); });
    return x.detach();
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    return {ctx.needs_grad(0) ? dy : Tensor{},
            ctx.needs_grad(1) ? sum_to(alpha == 1 ? dy : dy * alpha, from) : Tensor{}};
  }
};

struct Mul_ {
  static constexpr bool composed = true;
  Shape from{};

  Tensor forward(Context& ctx, const Tensor& x, const Tensor& y) {
    from = y.shape();
    const bool shared = y.handle()->storage == x.handle()->storage;
    const Tensor old_x = ctx.needs_grad(1) ? snapshot(x) : Tensor{};
    const Tensor old_y = !ctx.needs_grad(0) ? Tensor{} : shared ? snapshot(y) : y;
    ctx.save_for_backward(old_x, old_y);
    const Tensor now = readable(y, x);
    on_device(x.device(), [&](auto device) { kernels::mul_in_place(device, x, now); });
    return x.detach();
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    const auto [x, y] = ctx.saved<2>();
    return {ctx.needs_grad(0) ? dy * y : Tensor{}, ctx.needs_grad(1) ? sum_to(dy * x, from) : Tensor{}};
  }
};

struct Scale_ {
  static constexpr bool composed = true;
  double factor;

  Tensor forward(Context&, const Tensor& x) const {
    on_device(x.device(), [&](auto device) { kernels::mul_in_place(device, x, factor); });
    return x.detach();
  }
  Tensor backward(Context&, const Tensor& dy) const { return dy * factor; }
};

template <class Op, class... In>
const Tensor& write(const char* name, Op op, const Tensor& x, const In&... in) {
  const Tensor written = autograd::apply(std::move(op), x, in...);
  x.bump_version(name);
  autograd::adopt_history(x, written);
  return x;
}

}  // namespace

const Tensor& fill_(const Tensor& x, double value) {
  check_target(x, "fill_");
  detail::check_number(value, x.dtype(), "fill_");
  return write("fill_", Fill_{value}, x);
}

const Tensor& zero_(const Tensor& x) {
  check_target(x, "zero_");
  return write("zero_", Fill_{0}, x);
}

const Tensor& copy_(const Tensor& x, const Tensor& source) {
  check_target(x, "copy_");
  const Shape& shape = source.shape();
  check(shape == x.shape() || broadcast_shapes(x.shape(), shape, "copy_") == x.shape(),
        "copy_: expected a source that broadcasts to {}, got {}", x.shape(), shape);
  check(is_floating(x.dtype()) || !autograd::grad_enabled() || !source.requires_grad(),
        "copy_: the source of shape {} requires a gradient, which a target of {} cannot have; use no_grad or detach()",
        shape, x.dtype());
  return write("copy_", Copy_{}, x, source);
}

const Tensor& add_(const Tensor& x, const Tensor& y, double alpha) {
  check_target(x, "add_");
  check_source(x, y, "add_");
  detail::check_number(alpha, x.dtype(), "add_");
  return write("add_", Add_{alpha}, x, y);
}

const Tensor& mul_(const Tensor& x, const Tensor& y) {
  check_target(x, "mul_");
  check_source(x, y, "mul_");
  return write("mul_", Mul_{}, x, y);
}

const Tensor& mul_(const Tensor& x, double y) {
  check_target(x, "mul_");
  detail::check_number(y, x.dtype(), "mul_");
  return write("mul_", Scale_{y}, x);
}

}  // namespace mica
