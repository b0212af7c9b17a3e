#pragma once

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica {

struct DrawOptions {
  double temperature = 1;  ///< divides the scores; 0: take the token of the largest score
  std::int64_t top_k = 0;  ///< draw only among the k largest scores; 0: among all
  double top_p = 1;        ///< draw only among the most probable tokens: as few as have a total probability of at least
                           ///< top_p
  double repetition_penalty = 1;  ///< the positive scores of seen tokens are divided by it, the others multiplied
};

/// Whether draw_tokens() has a kernel for the logits: on CUDA with clusters (compute capability 9.0), up to 2¹⁸ columns
/// and any floating dtype but float64.
bool has_draw_kernel(const Tensor& logits);

/// Draws a token from the softmax of each row's scores, which are the logits after `options`. Computes in float64.
///
/// @param logits    (B, vocab).
/// @param uniforms  (B, 1) float64 in (0, 1], contiguous: a random number for each row; not read if temperature is 0 or
///                  top_k is 1.
/// @param seen      (B, vocab) bool: the tokens that repetition_penalty applies to; undefined: none.
/// @return (B) int64; −1 for a row with a logit that is NaN or +∞, and for a row of −∞ only.
///
/// A single kernel, which does not sort whole rows: it narrows the search down to a few scores first. Throws Error if
/// has_draw_kernel() is false or a shape, dtype or device does not match.
Tensor draw_tokens(const Tensor& logits, const DrawOptions& options, const Tensor& uniforms, const Tensor& seen = {});

}  // namespace mica
