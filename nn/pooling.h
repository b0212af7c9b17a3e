#pragma once

#include <mica/core/tensor.h>

namespace mica::nn {

/// How the features of a text's tokens become one vector: the modes of sentence-transformers' module Pooling.
enum class Pooling {
  mean,              ///< the sum over the visible tokens, divided by their number
  mean_sqrt_length,  ///< the same sum, divided by the square root of their number
  weighted_mean,     ///< the mean with the weight t + 1 for token t
  max,               ///< the largest value of each feature among the visible tokens
  first,             ///< the first token, visible or not: [CLS] or <s>
  last,              ///< the last visible token
};

/// One vector for each text: features (B, T, C), T >= 1, to (B, C). `visible` (B, T), bool or integers, is what the
/// model was given: false or 0 for padding; undefined: all tokens are visible. A row without visible tokens gives 0,
/// with Pooling::max −∞. Sums of 16-bit features are computed in float32. For vectors of length 1, see
/// mica::normalize. Throws an Error that names `pool_tokens` if a shape or a dtype does not match.
Tensor pool_tokens(const Tensor& features, const Tensor& visible = {}, Pooling pooling = Pooling::mean);

}  // namespace mica::nn
