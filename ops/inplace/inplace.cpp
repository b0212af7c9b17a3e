#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/operands.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/inplace/inplace_kernels.h>

namespace mica {

namespace {

void check_unrecorded(const Tensor& x, const char* op, const char* role) {
  check(!autograd::grad_enabled() || !x.requires_grad(),
        "{}: the {} of shape {} requires a gradient and writes in place are not recorded; use no_grad", op, role,
        x.shape());
}

void check_target(const Tensor& x, const char* op) {
  check_unrecorded(x, op, "target");
  for (int axis = 0; axis < x.dim(); ++axis) {
    check(x.shape()[axis] <= 1 || x.strides()[axis] != 0,
          "{}: expected a target whose elements have places of their own, got one of shape {} and strides {}", op,
          x.shape(), x.strides());
  }
}

// y, or a copy of it if writing x would change it before it is read.
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
  check_unrecorded(y, op, "source");
  check(detail::common_shape(x, y, op) == x.shape(), "{}: expected a source that broadcasts to {}, got {}", op,
        x.shape(), y.shape());
}

}  // namespace

const Tensor& fill_(const Tensor& x, double value) {
  check_target(x, "fill_");
  detail::check_number(value, x.dtype(), "fill_");
  fill_data(x, value);
  x.bump_version();
  return x;
}

const Tensor& zero_(const Tensor& x) {
  check_target(x, "zero_");
  fill_data(x, 0);
  x.bump_version();
  return x;
}

const Tensor& copy_(const Tensor& x, const Tensor& source) {
  check_target(x, "copy_");
  check_unrecorded(source, "copy_", "source");
  const Shape& shape = source.shape();
  check(shape == x.shape() || broadcast_shapes(x.shape(), shape, "copy_") == x.shape(),
        "copy_: expected a source that broadcasts to {}, got {}", x.shape(), shape);
  copy_into(x, broadcast_view(readable(source, x), x.shape()));
  x.bump_version();
  return x;
}

const Tensor& add_(const Tensor& x, const Tensor& y, double alpha) {
  check_target(x, "add_");
  check_source(x, y, "add_");
  detail::check_number(alpha, x.dtype(), "add_");
  const Tensor from = readable(y, x);
  on_device(x.device(), [&](auto device) { kernels::add_in_place(device, x, from, alpha); });
  x.bump_version();
  return x;
}

const Tensor& mul_(const Tensor& x, const Tensor& y) {
  check_target(x, "mul_");
  check_source(x, y, "mul_");
  const Tensor from = readable(y, x);
  on_device(x.device(), [&](auto device) { kernels::mul_in_place(device, x, from); });
  x.bump_version();
  return x;
}

const Tensor& mul_(const Tensor& x, double y) {
  check_target(x, "mul_");
  detail::check_number(y, x.dtype(), "mul_");
  on_device(x.device(), [&](auto device) { kernels::mul_in_place(device, x, y); });
  x.bump_version();
  return x;
}

}  // namespace mica
