#pragma once

#include <mica/core/tensor.h>

namespace mica {

struct AddEmbeddingOptions {
  double p = 0;  ///< the probability of dropout
  bool training = true;
};

/// The input of a transformer's first layer, such as the sum of token and position embeddings, in one pass:
///
///   y = dropout(embedding(weight, indices) + addend, p)
///
/// @param weight   (V, C), floating.
/// @param indices  int64 or int32 of any shape (…), in [0, V), on weight's device.
/// @param addend   of weight's dtype and device; its shape is the last one or more axes of (…, C). For example, (T, C)
///                 rows of a position embedding for indices (B, T).
/// @param options  p in [0, 1), which has no effect if not training.
/// @return (…, C) of weight's dtype, row-major. Differentiable any number of times.
///
/// See mica::embedding for indices out of range and for the gradient of weight, and mica::dropout for which elements
/// are dropped. Throws Error before anything is computed if a shape, dtype, device or option does not match.
Tensor add_embedding(const Tensor& weight, const Tensor& indices, const Tensor& addend,
                     AddEmbeddingOptions options = {});

}  // namespace mica
