#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Row indices[i] of `weight` for each i: the table look-up of word embeddings.
///
/// weight (V, C), floating; indices int64 or int32 of any shape (…), in [0, V), on the same device. Returns (…, C) of
/// weight's dtype. On the CPU an index out of range is an error that names it. On CUDA, where a check would have to
/// wait, its row is NaN and gets no gradient.
///
/// The gradient of a row is the sum of the gradients of its uses, in float32 for 16-bit weights, in an order that
/// depends on the indices alone.
Tensor embedding(const Tensor& weight, const Tensor& indices);

}  // namespace mica
