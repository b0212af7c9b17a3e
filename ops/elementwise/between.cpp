#include <cmath>

#include <mica/ops/elementwise/between.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>

namespace mica {

Tensor clamp(const Tensor& x, const Tensor& low, const Tensor& high) {
  check(low.defined() || high.defined(), "clamp: expected at least one bound");
  check(x.dtype() != boolean, "clamp: expected a numeric dtype, got bool");
  Tensor y = x;
  if (low.defined()) {
    y = where(logical_or(lt(y, low), isnan(low)), low, y);
  }
  if (high.defined()) {
    y = where(logical_or(gt(y, high), isnan(high)), high, y);
  }
  return y;
}

namespace {

// Throws for dtypes that lerp() does not take.
void check_lerp(const Tensor& a, const Tensor& b, DType weight) {
  check(is_floating(a.dtype()) && b.dtype() == a.dtype() && weight == a.dtype(),
        "lerp: expected tensors of one floating dtype, got {}, {} and {}", a.dtype(), b.dtype(), weight);
}

}  // namespace

// Both compute from the nearer end, so that a weight of 1 gives exactly b.

Tensor lerp(const Tensor& a, const Tensor& b, double weight) {
  check_lerp(a, b, a.dtype());
  const DType wide = accumulate_dtype(a.dtype());
  const Tensor from = a.to(wide), to = b.to(wide);
  const Tensor y = std::abs(weight) < 0.5 ? from + (to - from) * weight : to - (to - from) * (1 - weight);
  return y.to(a.dtype());
}

Tensor lerp(const Tensor& a, const Tensor& b, const Tensor& weight) {
  check_lerp(a, b, weight.dtype());
  const DType wide = accumulate_dtype(a.dtype());
  const Tensor from = a.to(wide), to = b.to(wide), w = weight.to(wide);
  const Tensor difference = to - from;
  return where(lt(abs(w.detach()), 0.5), from + w * difference, to - difference * (1 - w)).to(a.dtype());
}

}  // namespace mica
