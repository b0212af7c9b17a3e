#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <mica/nn/gpt.h>
#include <mica/nn/models/llama.h>

namespace mica::nn {

struct SamplingOptions {
  double temperature = 1;  ///< divides the logits; 0 takes the most likely token
  std::int64_t top_k = 0;  ///< draw among the k most likely tokens; 0: among all
  double top_p = 1;        ///< draw among the fewest most likely tokens whose probabilities add up to at least this
  double repetition_penalty = 1;  ///< for tokens already in the text: divides positive logits, multiplies others
  std::uint64_t seed = 0;         ///< of the sampler's own random numbers
};

/// Draws tokens from logits, in float64 and on their device: applies the repetition penalty (Keskar et al., 2019,
/// arXiv:1909.05858), then temperature, top_k and top_p (Holtzman et al., 2020, arXiv:1904.09751), as in transformers.
/// The same options and logits give the same tokens on any device, except if a random number differs from the boundary
/// between two tokens by only a rounding error. draw() can be captured into a CUDA graph after a first call; each
/// replay draws with new random numbers. Cannot be copied: the copy would draw from the same sequence of random
/// numbers.
class Sampler {
 public:
  /// Throws unless temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1 and repetition_penalty > 0.
  explicit Sampler(SamplingOptions options);
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  /// One token for each row of logits (B, vocab): (B) int64, without waiting for the device. −1 where a logit is NaN or
  /// +∞, or all are −∞. `seen`, (B, vocab) bool, marks the tokens that the repetition penalty applies to; undefined: no
  /// penalty.
  Tensor draw(const Tensor& logits, const Tensor& seen = {});
  /// draw(), copied to the host. Throws instead of returning −1.
  std::vector<std::int64_t> operator()(const Tensor& logits, const Tensor& seen = {});

  const SamplingOptions& options() const { return options_; }
  /// Whether draw() takes the largest logit and needs no random numbers.
  bool takes_largest() const { return options_.temperature == 0 || options_.top_k == 1; }

 private:
  SamplingOptions options_;
  const Tensor& draw_uniforms(std::int64_t rows, Device device);

  std::shared_ptr<std::uint64_t> draws_ = std::make_shared<std::uint64_t>(0);  // shared with captured graphs
  Tensor uniforms_;                                                            // (B, 1) float64, of the last draw
};

struct GenerateOptions {
  std::int64_t count = 128;  ///< maximum number of new tokens for each prompt
  SamplingOptions sampling{};
  std::vector<std::int64_t> stop_tokens{};  ///< a text ends after the first of these
  /// Called for each new token as soon as it is known, with the index of its prompt. Returning false ends that text.
  std::function<bool(std::size_t prompt, std::int64_t token)> on_token{};
  /// KeyValueCache::Config::window, which bounds the cache's memory; 0: no window.
  std::int64_t window = 0;
  /// On CUDA: launch each step as a CUDA graph where possible (KeyValueCache::can_decode()). The tokens are the same.
  bool cuda_graph = true;
};

/// Continues all prompts in one batch. Returns the new tokens of each, including the stop token if there was one.
/// Prompts may have different lengths, at least 1. The new tokens depend on the prompt's index in the batch, which
/// selects its random numbers, but, up to rounding, not on the other prompts. The exception is a model with dynamic or
/// longrope scaling: as in transformers, the longest text of the batch determines the frequencies of all
/// (RotaryEmbedding).
///
/// On CUDA, a step runs while the host still reads the tokens of the previous step. So after a stop token, one more
/// step may be computed in vain.
///
/// Each position is computed once (KeyValueCache). Once a text exceeds a GPT's context, only its last tokens are used,
/// and all of them are computed again for each new one. Runs in an Evaluation guard: dropout is off, and no module's
/// mode changes. Throws for an empty prompt, for a token outside the vocabulary, unless 0 ≤ count ≤ 2²⁴, and if logits
/// are not finite.
std::vector<std::vector<std::int64_t>> generate(const GPT& gpt, const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options = {});
std::vector<std::vector<std::int64_t>> generate(const Llama& llama,
                                                const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options = {});

/// Extends tokens (B, T), T ≥ 1, by `count` tokens: int64 (B, T + count) on the tokens' device.
Tensor generate(const GPT& gpt, const Tensor& tokens, std::int64_t count, SamplingOptions options = {});
Tensor generate(const Llama& llama, const Tensor& tokens, std::int64_t count, SamplingOptions options = {});

}  // namespace mica::nn
