#pragma once

#include <mica/nn/dropout.h>
#include <mica/nn/module.h>
#include <mica/ops/norm/add_layer_norm.h>

namespace mica::nn {

struct LayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;  ///< with a weight, and with a bias unless `bias` is false
  bool bias = true;
};

/// Layer normalization over the last axes of x, which must be `normalized_shape`: see mica::layer_norm.
///
/// The weight is initialized to 1, the bias to 0. Throws for an empty shape or eps < 0.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(const Shape& normalized_shape, LayerNormOptions options = {});
  explicit LayerNorm(std::int64_t size, LayerNormOptions options = {}) : LayerNorm(Shape{size}, options) {}

  Tensor operator()(const Tensor& x) const;
  /// residual + x and the norm of that sum, in one pass: see mica::add_layer_norm.
  AddLayerNormResult operator()(const Tensor& x, const Tensor& residual) const;
  /// Like above, for residual + dropout(x + x_bias); an undefined x_bias counts as 0.
  AddLayerNormResult operator()(const Tensor& x, const Tensor& residual, const Dropout& dropout,
                                const Tensor& x_bias = {}) const;

  Shape normalized_shape;
  double eps;
  Tensor weight;  // undefined without one
  Tensor bias;    // undefined without one
};

}  // namespace mica::nn
