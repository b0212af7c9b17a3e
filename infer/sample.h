#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::infer {

struct SamplingOptions {
  double temperature = 1;  ///< divides the logits; 0 takes the most likely token
  std::int64_t top_k = 0;  ///< sample among the k most likely tokens; 0: among all
  double top_p = 1;        ///< sample among the fewest most likely tokens whose probabilities add up to at least this
  double repetition_penalty = 1;  ///< for tokens already in the text: divides positive logits, multiplies others
  std::uint64_t seed = 0;         ///< of a Sampler's random numbers

  /// Whether the most likely token is taken, which needs no random numbers.
  bool takes_largest() const { return temperature == 0 || top_k == 1; }
};

/// Samples a token from the softmax of each row's logits: applies the repetition penalty (Keskar et al., 2019,
/// arXiv:1909.05858), then temperature, top_k and top_p (Holtzman et al., 2020, arXiv:1904.09751), as in transformers.
/// Computes in float64. Of tokens with equal logits at the boundary of top_k or top_p, those with smaller numbers are
/// kept; transformers keeps all that are equal to the k-th largest.
///
/// @param logits    (B, vocab), floating.
/// @param uniforms  (B, 1) float64 in (0, 1], contiguous, on the logits' device: a random number for each row; not read
///                  if options.takes_largest().
/// @param seen      (B, vocab) bool: the tokens that the repetition penalty applies to; undefined: none.
/// @return (B) int64; −1 for a row with a logit that is NaN or +∞, and for a row of −∞ only.
///
/// On a GPU of compute capability 9.0, one kernel does it for any dtype but float64 and up to 2¹⁸ columns. The same
/// arguments give the same tokens on any device, except if a random number differs from the boundary between two tokens
/// by only a rounding error. Throws Error if a shape, dtype or device does not match; does not check the options.
Tensor sample(const Tensor& logits, const SamplingOptions& options, const Tensor& uniforms, const Tensor& seen = {});

/// sample() with random numbers of its own. draw() can be captured into a CUDA graph after a first call; each replay
/// draws with new random numbers. Cannot be copied: the copy would draw from the same sequence of random numbers.
class Sampler {
 public:
  /// Throws unless temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1 and repetition_penalty > 0.
  explicit Sampler(SamplingOptions options);
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  /// sample(), without waiting for the device.
  Tensor draw(const Tensor& logits, const Tensor& seen = {});
  /// draw(), copied to the host. Throws instead of returning −1.
  std::vector<std::int64_t> operator()(const Tensor& logits, const Tensor& seen = {});

  const SamplingOptions& options() const { return options_; }

 private:
  const Tensor& draw_uniforms(std::int64_t rows, Device device);

  SamplingOptions options_;
  std::shared_ptr<std::uint64_t> draws_ = std::make_shared<std::uint64_t>(0);  // shared with captured graphs
  Tensor uniforms_;                                                            // (B, 1) float64, of the last draw
};

}  // namespace mica::infer
