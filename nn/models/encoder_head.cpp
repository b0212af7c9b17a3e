#include <mica/nn/models/encoder_head.h>

namespace mica::nn {

PredictionHead::PredictionHead(std::int64_t width, Activation activation, LinearOptions dense_options,
                               LayerNormOptions norm_options)
    : activation(activation),
      dense(child("dense", Linear{width, width, dense_options})),
      norm(child("norm", LayerNorm{width, norm_options})) {}

Tensor PredictionHead::operator()(const Tensor& x) const {
  return call(*this, x, [&](const Tensor& x) { return norm(dense(x, activation)); });
}

}  // namespace mica::nn
