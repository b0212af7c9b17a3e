#pragma once

#include <cstdint>
#include <vector>

#include <mica/nn/gpt.h>

namespace mica::nn {

struct SamplingOptions {
  double temperature = 1;  ///< divides the logits; 0 takes the most likely token
  std::int64_t top_k = 0;  ///< draw among the k most likely tokens; 0: among all
  std::uint64_t seed = 0;  ///< of the sampler's own random numbers
};

/// Draws tokens from logits. The same options and logits give the same tokens, on any device.
class Sampler {
 public:
  explicit Sampler(SamplingOptions options);

  /// One token for each row of logits (B, vocab). Throws if a logit is NaN or +∞, or all of a row are −∞.
  std::vector<std::int64_t> operator()(const Tensor& logits);

 private:
  SamplingOptions options_;
  std::uint64_t draws_ = 0;
};

/// Extends tokens (B, T), T ≥ 1, by `count` tokens: int64 (B, T + count) on the tokens' device. If the sequence exceeds
/// the context, only its last tokens are used. Dropout is off during the call, and nothing is recorded. Throws unless 0
/// ≤ count ≤ 2²⁴.
Tensor generate(GPT& gpt, const Tensor& tokens, std::int64_t count, SamplingOptions options = {});

}  // namespace mica::nn
