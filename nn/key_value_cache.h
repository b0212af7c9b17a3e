#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/attention/attention.h>

namespace mica::nn {

/// The keys and values of a text's earlier positions, so that a decoder computes only the new ones. A model creates its
/// cache (nn::GPT::new_cache, nn::Llama::new_cache) and takes it together with the next tokens:
///
///     nn::KeyValueCache cache = llama.new_cache(1);
///     Tensor logits = llama.next_token_logits(prompt, cache);      // (1, T)
///     while (…) {
///       logits = llama.next_token_logits(argmax(logits, 1, true), cache);  // (1, 1)
///     }
///
/// Needs autograd::NoGrad. The memory grows with the text, at most by doubling.
///
/// Shorter sequences of a batch are padded in front, with any tokens; set_padding() sets how many. Attention ignores
/// them, and the first real token of each sequence has position 0.
class KeyValueCache {
 public:
  struct Config {
    std::int64_t layers = 1;
    std::int64_t batch = 1;
    std::int64_t key_heads = 1;
    std::int64_t head_width = 1;
    DType dtype = float32;
    Device device = Device::cpu();
  };

  explicit KeyValueCache(const Config& config);

  const Config& config() const { return config_; }
  /// The positions that it holds, padding included.
  std::int64_t length() const { return length_; }
  /// Forgets all positions and the padding; keeps the memory.
  void clear();

  /// The number of padding tokens before each sequence. Throws unless the cache is empty and there is one number, not
  /// negative, for each sequence.
  void set_padding(const std::vector<std::int64_t>& padding);

  // For modules. A model calls begin(), its layers append(), and the model end(): if a layer throws, length() is as
  // before.

  /// The next `count` positions are going to be computed.
  void begin(std::int64_t count);
  void end();
  /// The new positions within their sequences, (batch, count) int64, 0 for padding; undefined without padding, where
  /// they are length(), length() + 1, …
  const Tensor& positions() const { return positions_; }
  /// Stores a layer's keys and values of the new positions, (batch, key_heads, count, head_width), and returns those of
  /// all positions.
  std::array<Tensor, 2> append(std::int64_t layer, const Tensor& keys, const Tensor& values);
  /// How the new positions see all positions.
  AttentionOptions attention_options() const;

 private:
  void reserve(std::int64_t length);

  Config config_;
  std::int64_t length_ = 0;
  std::int64_t count_ = 0;    // of new positions
  std::vector<Tensor> keys_;  // of each layer: (batch, key_heads, ≥ length, head_width)
  std::vector<Tensor> values_;
  Tensor padding_;  // (batch, 1) int64, undefined without padding
  Tensor positions_;
  Tensor mask_;  // (batch, 1, 1, length + count) bool, undefined without padding
};

/// A layer's place in a cache; without a cache, attention sees only what it is given.
struct CachedLayer {
  KeyValueCache* cache = nullptr;
  std::int64_t layer = 0;

  explicit operator bool() const { return cache != nullptr; }
};

}  // namespace mica::nn
