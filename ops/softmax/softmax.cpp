#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/softmax/detail/softmax_gradient.h>
#include <mica/ops/softmax/detail/softmax_kernels.h>
#include <mica/ops/softmax/softmax.h>

namespace mica {

namespace {

// Runs a forward or a backward kernel, unless there are no elements.
template <class Kernel>
Tensor forward_with(Kernel kernel, const Tensor& x, int axis) {
  const Tensor y = empty(x.shape(), x.dtype(), x.device());
  if (x.numel() > 0) {
    const Tensor rows = contiguous_data(x);
    const kernels::SoftmaxForward args{.x = rows, .axis = axis, .y = y};
    on_device(x.device(), [&](auto device) { kernel(device, args); });
  }
  return y;
}

template <class Kernel>
Tensor backward_with(Kernel kernel, const Tensor& y, const Tensor& dy, int axis) {
  const Tensor dx = empty(y.shape(), y.dtype(), y.device());
  if (y.numel() > 0) {
    const Tensor rows = contiguous_data(dy);
    const kernels::SoftmaxBackward args{.y = y, .dy = rows, .axis = axis, .dx = dx};
    on_device(y.device(), [&](auto device) { kernel(device, args); });
  }
  return dx;
}

// dx = y · (dy − Σ dy · y)
struct SoftmaxGradient {
  static constexpr bool composed = true;
  int axis;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& y) const {
    ctx.save_for_backward(dy, y);
    return backward_with([](auto device, const auto& args) { kernels::softmax_backward(device, args); }, y, dy, axis);
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [dy, y] = ctx.saved<2>();
    Tensors gradients(2);
    if (ctx.needs_grad(0)) {
      gradients[0] = autograd::apply(SoftmaxGradient{axis}, ddx, y);  // dx is linear in dy, by a symmetric matrix
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = ddx * (dy - sum(dy * y, {axis}, true)) - dy * sum(ddx * y, {axis}, true);
    }
    return gradients;
  }
};

struct Softmax {
  static constexpr bool composed = true;
  int axis;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor y = forward_with([](auto device, const auto& args) { kernels::softmax(device, args); }, x, axis);
    ctx.save_for_backward(y);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    return autograd::apply(SoftmaxGradient{axis}, dy, ctx.saved<1>()[0]);
  }
};

// dx = dy − eʸ · Σ dy
struct LogSoftmaxGradient {
  static constexpr bool composed = true;
  int axis;

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& y) const {
    ctx.save_for_backward(dy, y);
    return backward_with([](auto device, const auto& args) { kernels::log_softmax_backward(device, args); }, y, dy,
                         axis);
  }
  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [dy, y] = ctx.saved<2>();
    const Tensor scaled = ddx * exp(y);
    return {ctx.needs_grad(0) ? ddx - sum(scaled, {axis}, true) : Tensor{},
            ctx.needs_grad(1) ? neg(scaled * sum(dy, {axis}, true)) : Tensor{}};
  }
};

struct LogSoftmax {
  static constexpr bool composed = true;
  int axis;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor y = forward_with([](auto device, const auto& args) { kernels::log_softmax(device, args); }, x, axis);
    ctx.save_for_backward(y);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    return autograd::apply(LogSoftmaxGradient{axis}, dy, ctx.saved<1>()[0]);
  }
};

}  // namespace

Tensor detail::softmax_gradient(const Tensor& dy, const Tensor& y, int axis) {
  return autograd::apply(SoftmaxGradient{axis}, dy, y);
}

Tensor softmax(const Tensor& x, std::int64_t axis) {
  if (autograd::autocast_widens(x)) {
    return softmax(autograd::widened(x), axis);
  }
  check(is_floating(x.dtype()), "softmax: expected a floating dtype, got {}", x.dtype());
  return autograd::apply(Softmax{normalize_axis(axis, x.dim(), "softmax")}, x);
}

Tensor log_softmax(const Tensor& x, std::int64_t axis) {
  if (autograd::autocast_widens(x)) {
    return log_softmax(autograd::widened(x), axis);
  }
  check(is_floating(x.dtype()), "log_softmax: expected a floating dtype, got {}", x.dtype());
  return autograd::apply(LogSoftmax{normalize_axis(axis, x.dim(), "log_softmax")}, x);
}

}  // namespace mica
