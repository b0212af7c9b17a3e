#pragma once

#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

/// cross_entropy(linear(x, weight), targets, options) without all logits ever being there: rows go through in chunks,
/// each with logits of at most chunk_bytes (of one row at least).
///
/// @param x            (…, K), floating.
/// @param weight       (V, K), of x's dtype: one row for each class.
/// @param targets      as for cross_entropy, for logits (…, V); probabilities may not require a gradient.
/// @param chunk_bytes  of logits held at a time.
/// @return as cross_entropy, of x's dtype. Differentiable any number of times in x and weight.
///
/// For a mean or a sum, forward also computes the gradients that will be needed, and keeps those of x and weight
/// instead of logits; backward multiplies them by the incoming gradient. With Reduction::none backward computes the
/// logits again. The gradient of weight is summed over the chunks in float32 (float64 for float64). Logits are rounded
/// to x's dtype, and so is their gradient, as in the pair of ops; the results are the same from run to run.
///
/// Gradients of gradients (create_graph) go through the pair of ops, and hold all logits.
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not fit; in_place is not for this
/// op.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options = {}, std::int64_t chunk_bytes = std::int64_t{1} << 29);

}  // namespace mica
