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
  double top_p = 1;  ///< draw among the most likely tokens whose probabilities, without the last one's, are below it
  double repetition_penalty =
      1;                   ///< of tokens that are in the text: positive logits are divided by it, others multiplied
  std::uint64_t seed = 0;  ///< of the sampler's own random numbers
};

/// Draws tokens from logits, in float64 and on their device: the repetition penalty (Keskar et al., 2019,
/// arXiv:1909.05858) first, then temperature, top_k and top_p (Holtzman et al., 2020, arXiv:1904.09751), as in
/// transformers. The same options and logits give the same tokens on any device, but where a random number meets the
/// border between two tokens in the last of its 53 bits. draw() can be captured into a CUDA graph after a first call;
/// each replay draws with new random numbers.
class Sampler {
 public:
  /// Throws unless temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1 and repetition_penalty > 0.
  explicit Sampler(SamplingOptions options);

  /// One token for each row of logits (B, vocab): (B) int64, without waiting for the device. −1 where a logit is NaN or
  /// +∞, or all are −∞. `seen`, (B, vocab) bool, has the tokens that the repetition penalty is for; without it there is
  /// none.
  Tensor draw(const Tensor& logits, const Tensor& seen = {});
  /// The same on the host. Throws instead of −1.
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
  std::int64_t count = 128;  ///< at most so many new tokens for each prompt
  SamplingOptions sampling{};
  std::vector<std::int64_t> stop_tokens{};  ///< a text ends with the first of them
  /// Called for each new token as soon as it is there, with the number of its prompt. False ends that text.
  std::function<bool(std::size_t prompt, std::int64_t token)> on_token{};
  /// Of the KeyValueCache, whose memory it bounds; 0: none.
  std::int64_t window = 0;
  /// On CUDA: launch each step as a CUDA graph where that is possible (KeyValueCache::can_decode()). The same tokens.
  bool cuda_graph = true;
};

/// Continues all prompts in one batch. Returns each one's new tokens, with the stop token if there was one. Prompts may
/// have different lengths, at least 1. A prompt's tokens depend on its place in the batch, which selects its random
/// numbers, but, up to rounding, not on the other prompts.
///
/// On CUDA, a step runs while the host still reads the tokens of the step before. So one step may be computed that a
/// stop token makes useless.
///
/// Each position is computed once (KeyValueCache). A text longer than a GPT's context keeps only its last tokens, which
/// are then computed again for each new one. Dropout is off, and nothing is recorded. Throws for an empty prompt, for a
/// token outside the vocabulary, unless 0 ≤ count ≤ 2²⁴, and if logits are not finite.
std::vector<std::vector<std::int64_t>> generate(GPT& gpt, const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options = {});
std::vector<std::vector<std::int64_t>> generate(Llama& llama, const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options = {});

/// Extends tokens (B, T), T ≥ 1, by `count` tokens: int64 (B, T + count) on the tokens' device.
Tensor generate(GPT& gpt, const Tensor& tokens, std::int64_t count, SamplingOptions options = {});
Tensor generate(Llama& llama, const Tensor& tokens, std::int64_t count, SamplingOptions options = {});

}  // namespace mica::nn
