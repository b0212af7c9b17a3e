#pragma once

#include <concepts>
#include <cstdint>
#include <utility>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/nn/key_value_cache.h>

namespace mica::infer {

struct DecoderOptions {
  std::int64_t batch = 1;   ///< the number of texts
  std::int64_t window = 0;  ///< KeyValueCache::Config::window, which bounds the cache's memory; 0: no window
  /// On the CPU, products of few rows with quantized weights round activations to 8 bits: see RoundActivations.
  bool round_activations = true;
};

/// Continues a batch of texts with a language model, one token of each at a time:
///
///     infer::LlamaDecoder decoder(llama);
///     Tensor logits = decoder.prefill(prompt);        // (1, T)
///     while (…) {
///       logits = decoder.step(argmax(logits, 1));     // (1)
///     }
///
/// Runs in an nn::Evaluation guard: dropout is off, and nothing is recorded. The model must outlive the decoder, stay
/// where it is, and keep its device and dtypes; values of its parameters may change.
class Decoder {
 public:
  virtual ~Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  /// Reads new texts in place of the previous ones: tokens (B, T), int64, on the model's device, T ≥ 1. Shorter texts
  /// are padded on the left, with any tokens; `padding` has the number of these for each text (default: none). Returns
  /// the logits of the next tokens, (B, vocab).
  Tensor prefill(const Tensor& tokens, const std::vector<std::int64_t>& padding = {});
  /// Appends one token to each text, (B) int64, and returns the logits of the next ones, (B, vocab). On CUDA, a step
  /// can be captured into a CUDA graph, unless the model or its dtype needs host values: then the capture throws. Each
  /// replay is one step. Call reserve() before each replay.
  Tensor step(const Tensor& tokens);
  /// A greedy step: replaces tokens (B) by the most likely next ones, as infer::sample() chooses them at temperature 0.
  /// `on_host`, if given, is HostReader::slots(). Returns whether the step has written the tokens there, too, to slot
  /// length() % HostReader::kSlots.
  virtual bool replace(const Tensor& tokens, std::int64_t* on_host = nullptr);
  /// Makes room for texts of so many positions. Returns whether the memory has moved: then captured steps must be
  /// captured again.
  bool reserve(std::int64_t positions) { return cache_.reserve(positions); }

  std::int64_t batch() const { return cache_.config().batch; }
  std::int64_t window() const { return cache_.config().window; }
  Device device() const { return cache_.config().device; }
  std::int64_t vocab() const { return vocab_; }  ///< tokens are 0 … vocab() − 1
  /// The number of positions of the longest text.
  std::int64_t length() const { return cache_.length(); }
  /// The most positions that the model can compute.
  std::int64_t context() const { return cache_.config().context > 0 ? cache_.config().context : INT64_MAX; }

 protected:
  Decoder(nn::KeyValueCache cache, std::int64_t vocab, bool round_activations)
      : cache_(std::move(cache)), vocab_(vocab), round_activations_(round_activations) {}

  /// The logits (B, vocab) after tokens (B, T) that follow those in the cache; appends these to it.
  virtual Tensor read(const Tensor& tokens) = 0;

  nn::KeyValueCache cache_;

 private:
  std::int64_t vocab_;
  bool round_activations_;
};

/// A language model with a cache, such as nn::GPT.
template <class M>
concept CachedModel = requires(const M& model, const Tensor& tokens, nn::KeyValueCache* cache, std::int64_t n) {
  { model.new_cache(/*batch*/ n, /*window*/ n) } -> std::same_as<nn::KeyValueCache>;
  { model.next_token_logits(tokens, cache) } -> std::same_as<Tensor>;
  { model.config.vocab } -> std::convertible_to<std::int64_t>;
};

/// A decoder for any model with a cache. It computes what the model computes.
template <CachedModel Model>
class ComposedDecoder final : public Decoder {
 public:
  explicit ComposedDecoder(const Model& model, const DecoderOptions& options = {})
      : Decoder(model.new_cache(options.batch, options.window), model.config.vocab, options.round_activations),
        model_(model) {}

 private:
  Tensor read(const Tensor& tokens) override { return model_.next_token_logits(tokens, &cache_); }

  const Model& model_;
};

}  // namespace mica::infer
