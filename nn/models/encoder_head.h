#pragma once

// The heads of encoders: nn::Bert and nn::ModernBert.

#include <cstdint>

#include <mica/nn/layer_norm.h>
#include <mica/nn/linear.h>

namespace mica::nn {

/// What an encoder computes from its features: its logits().
enum class EncoderHead {
  none,       ///< nothing
  masked_lm,  ///< the hidden tokens, (B, T, vocab): masked language modeling
  sequence,   ///< a class for each text, (B, labels); with one label a score, as for ranking
  tokens,     ///< a class for each token, (B, T, labels)
};

/// The layer between the features and the last layer of a head: norm(activation(dense(x))), x (…, width) to (…, width).
class PredictionHead : public Module {
 public:
  PredictionHead(std::int64_t width, Activation activation, LinearOptions dense, LayerNormOptions norm);
  Tensor operator()(const Tensor& x) const;

  Activation activation;
  Linear dense;
  LayerNorm norm;
};

}  // namespace mica::nn
