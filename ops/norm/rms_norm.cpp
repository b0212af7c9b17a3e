#include <mica/autograd/autocast.h>
#include <mica/ops/norm/detail/norm_function.h>
#include <mica/ops/norm/rms_norm.h>

namespace mica {

namespace {

struct RMSNorm : norm::Norm {};

}  // namespace

Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, double eps) {
  if (autograd::autocast_widens(x)) {
    return rms_norm(autograd::widened(x), normalized_shape, autograd::widened(weight), eps);
  }
  const RMSNorm function{norm::check_norm("rms_norm", /*centered=*/false, x, normalized_shape, weight, {}, eps)};
  return autograd::apply(function, x, weight, Tensor{});
}

}  // namespace mica
