#include <mica/core/capture.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/close.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/sum.h>

namespace mica {

namespace {

bool all_true(const Tensor& is_true, const char* op) {
  if (is_true.device().is_cuda()) {
    check_not_capturing(op);
  }
  return sum(logical_not(is_true)).item() == 0;
}

}  // namespace

Tensor isclose(const Tensor& a, const Tensor& b, const Closeness& closeness) {
  check(closeness.rtol >= 0 && closeness.atol >= 0, "isclose: expected tolerances of at least 0, got {} and {}",
        closeness.rtol, closeness.atol);
  check(a.dtype() == b.dtype(), "isclose: expected tensors of one dtype, got {} and {}", a.dtype(), b.dtype());
  const DType wide = is_floating(a.dtype()) ? accumulate_dtype(a.dtype()) : float64;
  const Tensor x = a.detach().to(wide), y = b.detach().to(wide);
  const Tensor distance = abs(x - y);
  const Tensor near = logical_and(isfinite(distance), le(distance, abs(y) * closeness.rtol + closeness.atol));
  // int64 may be rounded to float64, but equal ones remain equal.
  const Tensor close = logical_or(near, eq(a, b));
  return closeness.equal_nan ? logical_or(close, logical_and(isnan(x), isnan(y))) : close;
}

bool allclose(const Tensor& a, const Tensor& b, const Closeness& closeness) {
  return all_true(isclose(a, b, closeness), "allclose");
}

bool equal(const Tensor& a, const Tensor& b) {
  check(a.dtype() == b.dtype(), "equal: expected tensors of one dtype, got {} and {}", a.dtype(), b.dtype());
  check(a.device() == b.device(), "equal: expected tensors on one device, got {} and {}", a.device(), b.device());
  return a.shape() == b.shape() && all_true(eq(a, b), "equal");
}

}  // namespace mica
