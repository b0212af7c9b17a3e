#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/bitwise.h>
#include <mica/ops/elementwise/detail/forward_kernels.h>
#include <mica/ops/elementwise/detail/operands.h>

namespace mica {

namespace {

template <class F>
Tensor bitwise(F f, const Tensor& a, const Tensor& b) {
  const Tensor out = empty(detail::common_shape(a, b, F::name), a.dtype(), a.device());
  on_device(out.device(), [&](auto device) { kernels::forward_binary(device, f, out, a, b); });
  return out;
}

template <class F>
Tensor bitwise(F f, const Tensor& a, double b) {
  detail::check_number(b, a.dtype(), F::name);
  const Tensor out = empty(a.shape(), a.dtype(), a.device());
  on_device(out.device(), [&](auto device) { kernels::forward_binary(device, f, out, a, b); });
  return out;
}

}  // namespace

Tensor bitwise_not(const Tensor& a) {
  const Tensor out = empty(a.shape(), a.dtype(), a.device());
  on_device(out.device(), [&](auto device) { kernels::forward_unary(device, functions::BitNot{}, out, a); });
  return out;
}
Tensor bitwise_and(const Tensor& a, const Tensor& b) { return bitwise(functions::BitAnd{}, a, b); }
Tensor bitwise_and(const Tensor& a, double b) { return bitwise(functions::BitAnd{}, a, b); }
Tensor bitwise_or(const Tensor& a, const Tensor& b) { return bitwise(functions::BitOr{}, a, b); }
Tensor bitwise_or(const Tensor& a, double b) { return bitwise(functions::BitOr{}, a, b); }
Tensor bitwise_xor(const Tensor& a, const Tensor& b) { return bitwise(functions::BitXor{}, a, b); }
Tensor bitwise_xor(const Tensor& a, double b) { return bitwise(functions::BitXor{}, a, b); }
Tensor bitwise_left_shift(const Tensor& a, const Tensor& b) { return bitwise(functions::ShiftLeft{}, a, b); }
Tensor bitwise_left_shift(const Tensor& a, double b) { return bitwise(functions::ShiftLeft{}, a, b); }
Tensor bitwise_right_shift(const Tensor& a, const Tensor& b) { return bitwise(functions::ShiftRight{}, a, b); }
Tensor bitwise_right_shift(const Tensor& a, double b) { return bitwise(functions::ShiftRight{}, a, b); }

}  // namespace mica
