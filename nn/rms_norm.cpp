#include <mica/core/creation.h>
#include <mica/nn/rms_norm.h>
#include <mica/ops/norm/rms_norm.h>

namespace mica::nn {

RMSNorm::RMSNorm(const Shape& normalized_shape, RMSNormOptions options)
    : normalized_shape(normalized_shape), eps(options.eps) {
  check(!normalized_shape.empty(), "RMSNorm: expected at least one axis to normalize over");
  check(eps >= 0, "RMSNorm: expected eps >= 0, got {}", eps);
  if (options.elementwise_affine) {
    weight = param("weight", ones(normalized_shape));
  }
}

Tensor RMSNorm::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return rms_norm(x, normalized_shape, weight, eps); });
}

AddRMSNormResult RMSNorm::operator()(const Tensor& x, const Tensor& residual) const {
  return call(*this, x, residual, [&](const Tensor& x, const Tensor& residual) {
    return add_rms_norm(x, residual, normalized_shape, weight, {.eps = eps});
  });
}

AddRMSNormResult RMSNorm::operator()(const Tensor& x, const Tensor& residual, const Dropout& dropout,
                                     const Tensor& x_bias) const {
  return call(*this, x, residual, x_bias, [&](const Tensor& x, const Tensor& residual, const Tensor& x_bias) {
    return add_rms_norm(x, residual, normalized_shape, weight,
                        {.p = dropout.p, .training = dropout.is_training(), .eps = eps, .x_bias = x_bias});
  });
}

}  // namespace mica::nn
