#include <mica/core/creation.h>
#include <mica/nn/layer_norm.h>
#include <mica/ops/norm/layer_norm.h>

namespace mica::nn {

LayerNorm::LayerNorm(const Shape& normalized_shape, LayerNormOptions options)
    : normalized_shape(normalized_shape), eps(options.eps) {
  check(!normalized_shape.empty(), "LayerNorm: expected at least one axis to normalize over");
  check(eps >= 0, "LayerNorm: expected eps >= 0, got {}", eps);
  if (options.elementwise_affine) {
    weight = param("weight", ones(normalized_shape));
    if (options.bias) {
      bias = param("bias", zeros(normalized_shape));
    }
  }
}

Tensor LayerNorm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return layer_norm(x, normalized_shape, weight, bias, eps); });
}

AddLayerNormResult LayerNorm::operator()(const Tensor& x, const Tensor& residual) const {
  return call(*this, x, residual, [&](const Tensor& x, const Tensor& residual) {
    return add_layer_norm(x, residual, normalized_shape, weight, bias, {.eps = eps});
  });
}

AddLayerNormResult LayerNorm::operator()(const Tensor& x, const Tensor& residual, const Dropout& dropout,
                                         const Tensor& x_bias) const {
  return call(*this, x, residual, x_bias, [&](const Tensor& x, const Tensor& residual, const Tensor& x_bias) {
    return add_layer_norm(x, residual, normalized_shape, weight, bias,
                          {.p = dropout.p, .training = dropout.is_training(), .eps = eps, .x_bias = x_bias});
  });
}

}  // namespace mica::nn
