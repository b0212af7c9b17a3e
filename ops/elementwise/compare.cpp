#include <limits>

#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/elementwise/unary.h>

namespace mica {

namespace {

enum class Order { given, exchanged };

Tensor compare(const char* op, kernels::Comparison f, const Tensor& a, const Tensor& b, Order order = Order::given) {
  const Tensor out = detail::new_result(detail::common_shape(a, b, op), boolean, a, b);
  const bool given = order == Order::given;
  on_device(out.device(),
            [&](auto device) { kernels::compare(device, f, a.dtype(), out, given ? a : b, given ? b : a); });
  return out;
}

Tensor compare(const char* op, kernels::Comparison f, const Tensor& a, double b, Order order = Order::given) {
  detail::check_number(b, a.dtype(), op);
  const Operand number = detail::rounded(b, a.dtype());
  const Tensor out = detail::new_result(a.shape(), boolean, a);
  const bool given = order == Order::given;
  on_device(out.device(), [&](auto device) {
    kernels::compare(device, f, a.dtype(), out, given ? Operand(a) : number, given ? number : Operand(a));
  });
  return out;
}

void check_boolean(const Tensor& x, const char* op) {
  check(x.dtype() == boolean, "{}: expected bool, got {}", op, x.dtype());
}

Tensor logical(const char* op, kernels::LogicalFunction f, const Tensor& a, const Tensor& b) {
  check_boolean(a, op);
  check_boolean(b, op);
  const Tensor out = detail::new_result(detail::common_shape(a, b, op), boolean, a, b);
  on_device(out.device(), [&](auto device) { kernels::logical(device, f, out, a, b); });
  return out;
}

}  // namespace

Tensor eq(const Tensor& a, const Tensor& b) { return compare("eq", functions::Equal{}, a, b); }
Tensor eq(const Tensor& a, double b) { return compare("eq", functions::Equal{}, a, b); }
Tensor ne(const Tensor& a, const Tensor& b) { return compare("ne", functions::NotEqual{}, a, b); }
Tensor ne(const Tensor& a, double b) { return compare("ne", functions::NotEqual{}, a, b); }
Tensor lt(const Tensor& a, const Tensor& b) { return compare("lt", functions::Less{}, a, b); }
Tensor lt(const Tensor& a, double b) { return compare("lt", functions::Less{}, a, b); }
Tensor le(const Tensor& a, const Tensor& b) { return compare("le", functions::LessEqual{}, a, b); }
Tensor le(const Tensor& a, double b) { return compare("le", functions::LessEqual{}, a, b); }
Tensor gt(const Tensor& a, const Tensor& b) { return compare("gt", functions::Less{}, a, b, Order::exchanged); }
Tensor gt(const Tensor& a, double b) { return compare("gt", functions::Less{}, a, b, Order::exchanged); }
Tensor ge(const Tensor& a, const Tensor& b) { return compare("ge", functions::LessEqual{}, a, b, Order::exchanged); }
Tensor ge(const Tensor& a, double b) { return compare("ge", functions::LessEqual{}, a, b, Order::exchanged); }

Tensor isnan(const Tensor& x) { return ne(x, x); }
Tensor isfinite(const Tensor& x) {
  return is_floating(x.dtype()) ? lt(abs(x.detach()), std::numeric_limits<double>::infinity()) : eq(x, x);
}

Tensor logical_and(const Tensor& a, const Tensor& b) { return logical("logical_and", functions::And{}, a, b); }
Tensor logical_or(const Tensor& a, const Tensor& b) { return logical("logical_or", functions::Or{}, a, b); }
Tensor logical_not(const Tensor& a) {
  check_boolean(a, "logical_not");
  const Tensor out = detail::new_result(a.shape(), boolean, a);
  on_device(out.device(), [&](auto device) { kernels::logical_not(device, out, a); });
  return out;
}

}  // namespace mica
