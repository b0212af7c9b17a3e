#pragma once

#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

/// cross_entropy(linear(x, weight), targets, options) without storing all logits: rows are processed in chunks, each
/// with at most chunk_bytes of logits (at least one row).
///
/// @param x            (…, K), floating.
/// @param weight       (V, K), of x's dtype: one row for each class.
/// @param targets      as for cross_entropy, for logits (…, V); probabilities may not require a gradient.
/// @param chunk_bytes maximum size of the logits in memory. @return as cross_entropy. Differentiable any number of
/// times in x and weight.
///
/// For a mean or a sum, forward also computes the gradients that will be needed, and stores those of x and weight
/// instead of logits; backward multiplies them by the incoming gradient. With Reduction::none, backward recomputes the
/// logits. The gradient of weight is summed over the chunks in float32 (float64 for float64). Logits are rounded to x's
/// dtype, and so is their gradient, as in the pair of ops; results are bit-identical from run to run.
///
/// Gradients of gradients (create_graph) use the pair of ops, and store all logits.
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not match; in_place is not
/// supported.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options = {}, std::int64_t chunk_bytes = std::int64_t{1} << 29);

}  // namespace mica
