#pragma once

#include <mica/ops/cross_entropy/cross_entropy.h>

namespace mica {

/// cross_entropy(linear(x, weight), targets, options) without storing all logits: rows are processed in chunks, so that
/// only one chunk's logits exist at a time.
///
/// @param x            (…, K), floating.
/// @param weight       (V, K), of x's dtype: one row for each class.
/// @param targets      as for cross_entropy, for logits (…, V); probabilities may not require a gradient.
/// @param chunk_bytes  the maximum size of a chunk's logits; a chunk has at least one row, however. At least 1.
/// @return as cross_entropy. Differentiable any number of times in x and weight.
///
/// For a mean or a sum, forward also computes the gradients of x and weight, if they will be needed, and stores these
/// instead of logits; backward multiplies them by the incoming gradient. With Reduction::none, backward recomputes the
/// logits. The gradient of weight is summed over the chunks in float32 (float64 for float64). Logits and their gradient
/// are rounded to x's dtype, as in linear() and cross_entropy(). Results are bit-identical from run to run.
///
/// Second derivatives (create_graph) are computed by linear() and cross_entropy(), which store all logits.
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not match; in_place is not
/// supported.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options = {}, std::int64_t chunk_bytes = std::int64_t{1} << 29);

}  // namespace mica
