#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/module.h>
#include <mica/ops/norm/add_rms_norm.h>

namespace mica::nn {

struct RMSNormOptions {
  double eps = 1e-6;
  bool elementwise_affine = true;  ///< weight
};

/// Root mean square normalization over the last axes of x, which must be `normalized_shape`: see mica::rms_norm.
///
/// weight starts at 1.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(const Shape& normalized_shape, RMSNormOptions options = {});
  explicit RMSNorm(std::int64_t size, RMSNormOptions options = {}) : RMSNorm(Shape{size}, options) {}

  Tensor operator()(const Tensor& x) const;
  /// residual + x and the norm of that sum, in one pass: see mica::add_rms_norm.
  AddRMSNormResult operator()(const Tensor& x, const Tensor& residual) const;
  /// The same for residual + dropout(x + x_bias), where an undefined x_bias is 0.
  AddRMSNormResult operator()(const Tensor& x, const Tensor& residual, const Dropout& dropout,
                              const Tensor& x_bias = {}) const;

  Shape normalized_shape;
  double eps;
  Tensor weight;  // undefined without one
};

}  // namespace mica::nn
