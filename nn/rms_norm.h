#pragma once

#include <mica/nn/module.h>

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

  Shape normalized_shape;
  double eps;
  Tensor weight;  // undefined without one
};

}  // namespace mica::nn
