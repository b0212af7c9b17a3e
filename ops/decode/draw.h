#pragma once

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica {

struct DrawOptions {
  double temperature = 1;         ///< divides the scores; 0 takes the largest
  std::int64_t top_k = 0;         ///< draw among the k largest only; 0: among all
  double top_p = 1;               ///< draw among the largest whose probabilities, without the last one's, are below it
  double repetition_penalty = 1;  ///< of seen tokens: positive scores are divided by it, others multiplied
};

/// Whether draw_tokens() has a kernel for the logits: on CUDA with clusters (compute capability 9.0), up to 2¹⁸ columns
/// and any floating dtype but float64.
bool has_draw_kernel(const Tensor& logits);

/// Draws a token for each row of logits (B, vocab), in float64: (B) int64. −1 where a logit is NaN or +∞, or all are
/// −∞. `uniforms` (B, 1) float64 in (0, 1] are the random numbers, not needed for temperature 0 or top_k 1; `seen`
/// (B, vocab) bool, or undefined.
///
/// One kernel, which sorts only the scores near the token where a sum of weights ends. Throws Error if
/// has_draw_kernel() is false or a shape, dtype or device does not match.
Tensor draw_tokens(const Tensor& logits, const DrawOptions& options, const Tensor& uniforms, const Tensor& seen = {});

}  // namespace mica
