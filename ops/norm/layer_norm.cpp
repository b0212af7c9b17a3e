#include <mica/autograd/autocast.h>
#include <mica/ops/norm/detail/norm_function.h>
#include <mica/ops/norm/layer_norm.h>

namespace mica {

namespace {

struct LayerNorm : norm::Norm {};

}  // namespace

Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  if (autograd::autocast_widens(x)) {
    return layer_norm(autograd::widened(x), normalized_shape, autograd::widened(weight), autograd::widened(bias), eps);
  }
  const LayerNorm function{norm::check_norm("layer_norm", /*centered=*/true, x, normalized_shape, weight, bias, eps)};
  return autograd::apply(function, x, weight, bias);
}

}  // namespace mica
