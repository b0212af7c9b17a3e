#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/tensor.h>
#include <mica/ops/attention/attention.h>

namespace mica::nn {

/// The keys and values of the positions computed so far, so that a decoder computes only the new ones. A model creates
/// its cache (nn::GPT::new_cache, nn::Llama::new_cache) and takes it as an argument with the next tokens:
///
///     nn::KeyValueCache cache = llama.new_cache(1);
///     Tensor logits = llama.next_token_logits(prompt, &cache);      // (1, T)
///     while (…) {
///       logits = llama.next_token_logits(argmax(logits, 1, true), &cache);  // (1, 1)
///     }
///
/// Needs autograd::NoGrad. The memory grows with the text, at most by doubling. mica::infer has faster decoders.
///
/// Shorter sequences of a batch are padded on the left, with any tokens; set_padding() says with how many. Attention
/// ignores the padding, and the first real token of each sequence has position 0.
///
/// With a window, a layer's memory is a ring buffer of `window` positions: position p is at index p mod window.
/// Positions are still counted from the start of the text. A rotary embedding depends only on the distance of two
/// positions, so a text may have any length. With learned positions (GPT), it still ends at the model's context.
///
/// On CUDA the length is also kept on the device. Where mica::decode_attention() supports the cache, a step of one
/// position reads it there and can be captured into a CUDA graph: each replay appends one position. The memory must not
/// grow between the capture and a replay: call reserve() first.
///
/// A cache can be moved, and captured graphs remain valid; clone() copies it. A cache that was moved from throws when
/// it is used.
class KeyValueCache {
 public:
  struct Config {
    std::int64_t layers = 1;
    std::int64_t batch = 1;
    std::int64_t key_heads = 1;
    std::int64_t head_width = 1;
    DType dtype = float32;
    Device device = Device::cpu();
    std::optional<double> scale{};  ///< AttentionOptions::scale
    double cap = 0;                 ///< AttentionOptions::cap
    std::int64_t window = 0;        ///< each position sees itself and the window − 1 before it; 0: all
    /// The model's own window in each layer; the smaller of both counts. Empty: none.
    std::vector<std::int64_t> windows{};
    std::int64_t context = 0;  ///< the most positions that the model computes; 0: no limit
  };

  explicit KeyValueCache(const Config& config);  ///< throws for invalid sizes or a dtype that is not floating
  KeyValueCache(KeyValueCache&&) noexcept = default;
  KeyValueCache& operator=(KeyValueCache&&) noexcept = default;
  KeyValueCache& operator=(const KeyValueCache&) = delete;

  /// A cache with the same contents and its own memory, to continue a text in several ways.
  KeyValueCache clone() const;

  const Config& config() const { return config_; }
  /// The number of positions of the text, padding included. With a window, only the last ones are kept.
  std::int64_t length() const {
    check(length_ != nullptr, "KeyValueCache: used after it was moved from");
    return *length_;
  }
  /// The number of positions for which all layers without a smaller window have memory.
  std::int64_t capacity() const;
  /// The window of a layer; 0: none.
  std::int64_t window_of(std::int64_t layer) const { return window_at(index_of(layer)); }
  /// Whether the memory may hold `count` more positions than length() in all layers: none has a smaller window.
  bool keeps_all(std::int64_t count) const;
  /// Makes room for a total of `positions`, in each layer at most its window. Keeps the contents. Returns whether the
  /// memory has moved, so that captured graphs are no longer valid.
  bool reserve(std::int64_t positions);
  /// Forgets all positions and the padding; keeps the memory.
  void clear();

  /// The number of padding tokens before each sequence. Throws unless the cache is empty and there is one number, not
  /// negative, for each sequence.
  void set_padding(const std::vector<std::int64_t>& padding);

  // For models. A model calls begin(), then each layer calls attend(), then the model calls end(). If a layer throws,
  // length() does not change.

  /// Starts a step that computes `count` new positions of each of `sequences` sequences. Throws unless there are
  /// config().batch of them, and during a capture, if the step cannot be captured.
  void begin(std::int64_t sequences, std::int64_t count);
  /// The new positions within their sequences, (batch, count) int64, 0 for padding. Undefined if they are length(),
  /// length() + 1, … for all sequences, unless the step can be captured.
  const Tensor& positions() const;
  /// The length of the longest text, without padding, including the new positions. Throws during a capture.
  std::int64_t longest() const;
  /// Stores a layer's keys and values of the new positions, and returns the attention of their queries to all positions
  /// that they may see. q (batch, heads, count, head_width), k and v (batch, key_heads, count, head_width) to (batch,
  /// count, heads · head_width).
  Tensor attend(std::int64_t layer, const Tensor& q, const Tensor& k, const Tensor& v);
  /// `counted`: whether the step has already added the new positions to device_length().
  void end(bool counted = false);

  // For decoders with kernels of their own, which write the new keys and values themselves: between begin() and end(),
  // after reserve().

  const Tensor& keys(std::int64_t layer) const { return keys_[index_of(layer)]; }  ///< (batch, key_heads, capacity, D)
  const Tensor& values(std::int64_t layer) const { return values_[index_of(layer)]; }
  /// The number of positions before the step, (1) int64; undefined on the CPU.
  const Tensor& device_length() const { return device_length_; }
  /// (batch, 1) int64; undefined if there is no padding.
  const Tensor& padding() const { return padding_; }
  /// attend() for keys and values that are stored already, if the memory holds all positions.
  Tensor attend_stored(std::int64_t layer, const Tensor& q) const;

 private:
  KeyValueCache(const KeyValueCache&) = default;  // shares the memory; for clone()

  std::size_t index_of(std::int64_t layer) const;  // throws if there is no such layer
  /// Attention to keys and values (batch, key_heads, S, D) of the last S positions, including the new ones.
  Tensor attend_to(std::size_t at, const Tensor& q, const Tensor& keys, const Tensor& values) const;
  std::int64_t window_at(std::size_t at) const {
    const std::int64_t own = config_.windows.empty() ? 0 : config_.windows[at];
    return own == 0 || (config_.window > 0 && config_.window < own) ? config_.window : own;
  }
  /// The capacity of a layer needed for this many positions.
  std::int64_t needed(std::size_t at, std::int64_t positions) const {
    return window_at(at) == 0 ? positions : std::min(positions, window_at(at));
  }
  std::int64_t capacity_at(std::size_t at) const { return keys_[at].defined() ? keys_[at].size(2) : 0; }
  Tensor earlier(const Tensor& list, std::int64_t visible) const;
  void store(const Tensor& list, const Tensor& added) const;

  Config config_;
  std::shared_ptr<std::int64_t> length_ = std::make_shared<std::int64_t>(0);  // shared with captured graphs
  Tensor device_length_;                                                      // (1) int64, on CUDA
  Tensor one_;                                                                // (1) int64, on CUDA: the number 1
  bool steps_on_device_;      // a step of one position reads the length there
  std::int64_t count_ = 0;    // of new positions
  std::vector<Tensor> keys_;  // of each layer: (batch, key_heads, ≥ length, head_width)
  std::vector<Tensor> values_;
  Tensor padding_;  // (batch, 1) int64, undefined without padding
  std::int64_t least_padding_ = 0;
  mutable Tensor positions_;  // of the new positions; this and mask_ are computed on demand
  mutable Tensor mask_;       // (batch, 1, 1, length) boolean: false for padding
};

/// A layer's index in a cache. Without a cache, attention sees only the keys it is given.
struct CachedLayer {
  KeyValueCache* cache = nullptr;
  std::int64_t layer = 0;

  explicit operator bool() const { return cache != nullptr; }
};

}  // namespace mica::nn
