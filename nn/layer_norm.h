#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/module.h>
#include <mica/ops/norm/add_layer_norm.h>

namespace mica::nn {

struct LayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;  ///< weight, and bias unless that is off
  bool bias = true;
};

/// Layer normalization over the last axes of x, which must be `normalized_shape`: see mica::layer_norm.
///
/// weight starts at 1, bias at 0.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(const Shape& normalized_shape, LayerNormOptions options = {});
  explicit LayerNorm(std::int64_t size, LayerNormOptions options = {}) : LayerNorm(Shape{size}, options) {}

  Tensor operator()(const Tensor& x) const;
  /// residual + x and the norm of that sum, in one pass: see mica::add_layer_norm.
  AddLayerNormResult operator()(const Tensor& x, const Tensor& residual) const;
  /// The same for residual + dropout(x + x_bias), where an undefined x_bias is 0.
  AddLayerNormResult operator()(const Tensor& x, const Tensor& residual, const Dropout& dropout,
                                const Tensor& x_bias = {}) const;

  Shape normalized_shape;
  double eps;
  Tensor weight;  // undefined without one
  Tensor bias;    // undefined without one
};

}  // namespace mica::nn
