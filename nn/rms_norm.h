#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/module.h>
#include <mica/ops/norm/add_rms_norm.h>

namespace mica::nn {

struct RMSNormOptions {
  double eps = 1e-6;
  bool elementwise_affine = true;  ///< with a weight
};

/// Root mean square normalization over the last axes of x, which must be `normalized_shape`: see mica::rms_norm.
///
/// The weight is initialized to 1. Throws for an empty shape or eps < 0.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(const Shape& normalized_shape, RMSNormOptions options = {});
  explicit RMSNorm(std::int64_t size, RMSNormOptions options = {}) : RMSNorm(Shape{size}, options) {}

  Tensor operator()(const Tensor& x) const;
  /// residual + x and the norm of that sum, in one pass: see mica::add_rms_norm.
  AddRMSNormResult operator()(const Tensor& x, const Tensor& residual) const;
  /// Like above, for residual + dropout(x + x_bias); an undefined x_bias counts as 0.
  AddRMSNormResult operator()(const Tensor& x, const Tensor& residual, const Dropout& dropout,
                              const Tensor& x_bias = {}) const;

  Shape normalized_shape;
  double eps;
  Tensor weight;  // undefined without one
};

}  // namespace mica::nn
