#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/decode/decode.h>
#include <mica/ops/decode/decoder_step.h>

namespace mica::nn {

/// The keys and values of the positions computed so far, so that a decoder computes only the new ones. A model creates
/// its cache (nn::GPT::new_cache, nn::Llama::new_cache) and takes it as an argument with the next tokens:
///
///     nn::KeyValueCache cache = llama.new_cache(1);
///     Tensor logits = llama.next_token_logits(prompt, cache);      // (1, T)
///     while (…) {
///       logits = llama.next_token_logits(argmax(logits, 1, true), cache);  // (1, 1)
///     }
///
/// Needs autograd::NoGrad. The memory grows with the text, at most by doubling.
///
/// Shorter sequences of a batch are padded on the left, with any tokens; set_padding() says with how many. Attention
/// ignores the padding, and the first real token of each sequence has position 0.
///
/// With a window, memory is a ring buffer of `window` positions: position p is at index p mod window. Positions are
/// still counted from the start of the text. A rotary embedding depends only on the distance of two positions, so a
/// text may have any length. With learned positions (GPT), it still ends at the model's context.
///
/// On CUDA the length is also kept on the device, and a step of one position reads it there (mica::decode_attention),
/// so that the step can be captured into a CUDA graph: each replay appends one position. The memory must not grow
/// between the capture and a replay: call reserve() first.
///
/// A cache can be moved, and then serves captured graphs in its new place; clone() copies it. A cache that was moved
/// from throws when it is used.
class KeyValueCache {
 public:
  struct Config {
    std::int64_t layers = 1;
    std::int64_t batch = 1;
    std::int64_t key_heads = 1;
    std::int64_t head_width = 1;
    DType dtype = float32;
    Device device = Device::cpu();
    std::int64_t window = 0;  ///< each position sees itself and the window − 1 before it; 0: all
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
  /// The number of positions for which there is memory.
  std::int64_t capacity() const { return keys_.empty() || !keys_[0].defined() ? 0 : keys_[0].size(2); }
  /// Whether there is memory for one more position.
  bool has_room() const { return capacity() >= needed(length() + 1); }
  /// Makes room for a total of `positions`, or of `window` if that is less. Keeps the contents.
  void reserve(std::int64_t positions);
  /// Forgets all positions and the padding; keeps the memory.
  void clear();

  /// The number of padding tokens before each sequence. Throws unless the cache is empty and there is one number, not
  /// negative, for each sequence.
  void set_padding(const std::vector<std::int64_t>& padding);

  /// Whether a step of one position can be computed by decode(), and captured.
  bool can_decode() const;
  /// Whether decode() can compute `count` new positions: they fit into the memory, and there are kernels for this GPU.
  bool can_decode_prompt(std::int64_t count) const;

  // For modules. A model calls begin(), then each layer calls append() or decode(), then the model calls end(). If a
  // layer throws, length() does not change.

  /// Starts a step that computes `count` new positions of each of `sequences` sequences. Throws unless there are
  /// config().batch of them.
  void begin(std::int64_t sequences, std::int64_t count);
  void end();
  /// The new positions within their sequences, (batch, count) int64, 0 for padding; undefined without padding, where
  /// they are length(), length() + 1, …
  const Tensor& positions() const;
  /// Stores a layer's keys and values of the new positions, (batch, key_heads, count, head_width), and returns those of
  /// all positions that the new ones may attend to, in order.
  std::array<Tensor, 2> append(std::int64_t layer, const Tensor& keys, const Tensor& values);
  /// append() and attention together. `step` comes without the members that describe the cache. Throws unless
  /// can_decode(), and unless there is one new position or can_decode_prompt().
  Tensor decode(std::int64_t layer, DecodeAttention step);
  /// Like above, with step.qkv = decode_linear(x, weights, options), where `weights` are those of queries, keys and
  /// values.
  Tensor decode(std::int64_t layer, const Tensor& x, const std::vector<DecodeWeight>& weights,
                const DecodeLinearOptions& options, DecodeAttention step);
  /// Whether mica::decoder_step() can compute a step of one new position; fills in the members of `step` that describe
  /// the cache. The step then adds to the length on the device, and end() does not.
  bool prepare(DecoderStep& step);
  /// The new position within each sequence, (batch, 1) int64, computed from the length that is kept on the device.
  Tensor decode_positions() const;
  /// The length of the longest text, without padding, including the new positions.
  std::int64_t longest() const { return length() + count_ - least_padding_; }
  /// The options with which the new positions attend to all positions.
  AttentionOptions attention_options() const;

 private:
  KeyValueCache(const KeyValueCache&) = default;  // shares the memory; for clone()

  void check_layer(std::int64_t layer) const;
  /// Checks the arguments, makes room and fills in the members of `step` that describe the cache.
  void begin_decode(std::int64_t layer, DecodeAttention& step);
  /// Attention of a prompt's queries (B, T, H, D) to the earlier positions and to the prompt itself.
  Tensor attend(const Tensor& queries, const DecodeAttention& step) const;
  /// The capacity needed for this many positions.
  std::int64_t needed(std::int64_t positions) const {
    return config_.window == 0 ? positions : std::min(positions, config_.window);
  }
  /// The number of earlier positions that the first new one attends to.
  std::int64_t visible() const { return config_.window == 0 ? length() : std::min(length(), config_.window - 1); }
  Tensor earlier(const Tensor& list) const;
  void store(const Tensor& list, const Tensor& added) const;

  Config config_;
  std::shared_ptr<std::int64_t> length_ = std::make_shared<std::int64_t>(0);  // shared with captured graphs
  Tensor device_length_;                                                      // (1) int64, on CUDA
  Tensor one_;                                                                // (1) int64, on CUDA: the number 1
  Tensor scratch_;            // of decoder_step(); created at its first use
  std::int64_t count_ = 0;    // of new positions
  bool step_counts_ = false;  // decoder_step() adds the new positions to device_length_
  std::vector<Tensor> keys_;  // of each layer: (batch, key_heads, ≥ length, head_width)
  std::vector<Tensor> values_;
  Tensor padding_;  // (batch, 1) int64, undefined without padding
  std::int64_t least_padding_ = 0;
  mutable Tensor positions_;  // of the new positions; this and mask_ are computed on demand
  mutable Tensor mask_;       // of attention; undefined if none is needed
  /// The rotations of a prompt's new positions, computed when the first layer needs them.
  struct Rotations {
    std::vector<float> frequencies{};
    double scale = 1;
    Tensor table{};
  };
  Rotations rotations_;
};

/// A layer's index in a cache. Without a cache, attention sees only the keys it is given.
struct CachedLayer {
  KeyValueCache* cache = nullptr;
  std::int64_t layer = 0;

  explicit operator bool() const { return cache != nullptr; }
};

}  // namespace mica::nn
