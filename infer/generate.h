#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include <mica/infer/decoder.h>
#include <mica/infer/llama_decoder.h>
#include <mica/infer/sample.h>

namespace mica::infer {

struct GenerateOptions {
  std::int64_t count = 128;  ///< maximum number of new tokens for each prompt
  SamplingOptions sampling{};
  std::vector<std::int64_t> stop_tokens{};  ///< a text ends after the first of these
  /// Called for each new token as soon as it is known, with the index of its prompt. Returning false ends that text.
  std::function<bool(std::size_t prompt, std::int64_t token)> on_token{};
  /// DecoderOptions::window, for the decoder of a model. 0: no window.
  std::int64_t window = 0;
  bool round_activations = true;  ///< DecoderOptions::round_activations, likewise
  /// On CUDA: launch each step as a CUDA graph where possible (Decoder::step()). The tokens are the same.
  bool cuda_graph = true;
};

/// Continues all prompts in one batch. Returns the new tokens of each, including the stop token if there was one.
/// Prompts may have different lengths, at least 1. The new tokens depend on the prompt's index in the batch, which
/// selects its random numbers, but, up to rounding, not on the other prompts. The exception is a model with dynamic or
/// longrope scaling: as in transformers, the longest text of the batch determines the frequencies of all
/// (nn::RotaryEmbedding).
///
/// On CUDA, a step runs while the host still reads the tokens of the previous step. So after a stop token, one more
/// step may be computed in vain.
///
/// Each position is computed once (nn::KeyValueCache). Once a text exceeds a model's context (GPT), only its last
/// tokens are used, and all of them are computed again for each new one. Throws for an empty prompt, for a token
/// outside the vocabulary, unless 0 ≤ count ≤ 2²⁴ and there are as many prompts as the decoder's texts, for a window
/// that is not the decoder's, and if logits are not finite.
std::vector<std::vector<std::int64_t>> generate(Decoder& decoder, const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options = {});

/// The decoder that generates with a model: the one that was made for it, or the composed one.
template <CachedModel Model>
using DecoderOf = std::conditional_t<std::is_same_v<Model, nn::Llama>, LlamaDecoder, ComposedDecoder<Model>>;

/// generate() by a DecoderOf<Model>.
template <CachedModel Model>
std::vector<std::vector<std::int64_t>> generate(const Model& model,
                                                const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options = {}) {
  DecoderOf<Model> decoder(model, {.batch = std::max<std::int64_t>(1, std::ssize(prompts)),
                                   .window = options.window,
                                   .round_activations = options.round_activations});
  return generate(decoder, prompts, options);
}

}  // namespace mica::infer
