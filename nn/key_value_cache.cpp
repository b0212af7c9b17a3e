#include <algorithm>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/key_value_cache.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

KeyValueCache::KeyValueCache(const Config& config) : config_(config) {
  check(config.layers >= 0 && config.layers <= detail::kMostLayers && config.batch >= 1 && config.key_heads >= 1 &&
            config.head_width >= 1,
        "KeyValueCache: expected 0 to {} layers and at least 1 sequence, 1 head and 1 column, got {}, {}, {} and {}",
        detail::kMostLayers, config.layers, config.batch, config.key_heads, config.head_width);
  check(is_floating(config.dtype), "KeyValueCache: expected a floating dtype, got {}", config.dtype);
  check(config.window >= 0, "KeyValueCache: expected a window of at least 1, or 0 for none, got {}", config.window);
  keys_.resize(static_cast<std::size_t>(config.layers));
  values_.resize(static_cast<std::size_t>(config.layers));
  if (config.device.is_cuda()) {
    device_length_ = zeros({1}, int64, config.device);
    one_ = ones({1}, int64, config.device);
  }
}

KeyValueCache KeyValueCache::clone() const {
  KeyValueCache result(*this);
  result.length_ = std::make_shared<std::int64_t>(length());
  const auto copied = [](const Tensor& x) {
    if (!x.defined()) {
      return Tensor{};
    }
    const Tensor copy = empty(x.shape(), x.dtype(), x.device());
    copy_into(copy, x);
    return copy;
  };
  result.device_length_ = copied(device_length_);
  result.scratch_ = {};
  result.count_ = 0;  // without a step that did not end
  for (std::vector<Tensor>* const list : {&result.keys_, &result.values_}) {
    for (Tensor& x : *list) {
      x = copied(x);
    }
  }
  return result;
}

void KeyValueCache::clear() {
  check(length_ != nullptr, "KeyValueCache: used after it was moved from");
  *length_ = 0;
  count_ = 0;
  padding_ = positions_ = mask_ = {};
  least_padding_ = 0;
  if (device_length_.defined()) {
    fill_data(device_length_, 0);
  }
}

void KeyValueCache::set_padding(const std::vector<std::int64_t>& padding) {
  check(length() == 0, "KeyValueCache: expected an empty cache to set the padding, got one of {} positions", length());
  check(static_cast<std::int64_t>(padding.size()) == config_.batch,
        "KeyValueCache: expected the padding of {} sequences, got {}", config_.batch, padding.size());
  const bool has_any = std::any_of(padding.begin(), padding.end(), [](std::int64_t n) { return n != 0; });
  check(std::all_of(padding.begin(), padding.end(), [](std::int64_t n) { return n >= 0; }),
        "KeyValueCache: expected padding that is not negative");
  padding_ = has_any ? from_data(padding, {config_.batch, 1}, config_.device) : Tensor{};
  least_padding_ = *std::min_element(padding.begin(), padding.end());
}

void KeyValueCache::begin(std::int64_t sequences, std::int64_t count) {
  check(!autograd::grad_enabled(), "KeyValueCache: works without gradients only: use autograd::NoGrad");
  check(count >= 1 && count <= INT64_MAX / 4 - length(), "KeyValueCache: expected at least 1 new position, got {}",
        count);
  check(sequences == config_.batch, "KeyValueCache: expected tokens of {} sequences, the cache's batch, got {}",
        config_.batch, sequences);
  count_ = count;
  step_counts_ = false;
  positions_ = mask_ = {};
  rotations_ = {};
}

void KeyValueCache::end() {
  if (device_length_.defined() && !step_counts_) {
    add_(device_length_, one_, static_cast<double>(count_));
  }
  on_each_replay([length = length_, count = count_] { *length += count; });
  count_ = 0;
  rotations_ = {};
}

const Tensor& KeyValueCache::positions() const {
  if (padding_.defined() && !positions_.defined()) {
    const Tensor slots = arange(static_cast<double>(length() + count_), int64, config_.device);
    positions_ = maximum(slice(slots, 0, length(), length() + count_) - padding_, 0);
  }
  return positions_;
}

Tensor KeyValueCache::decode_positions() const {
  const Tensor length = reshape(device_length_, {1, 1});
  return padding_.defined() ? maximum(length - padding_, 0) : expand(length, {config_.batch, 1});
}

bool KeyValueCache::can_decode() const {
  return config_.layers > 0 && has_decode_attention(config_.dtype, config_.head_width, config_.device);
}

bool KeyValueCache::can_decode_prompt(std::int64_t count) const {
  return can_decode() && has_prompt_kernels(config_.dtype, config_.head_width, config_.device) &&
         needed(length() + count) == length() + count;
}

void KeyValueCache::reserve(std::int64_t positions) {
  const std::int64_t kept = length();
  positions = needed(positions);
  if (config_.layers == 0 || positions <= capacity()) {
    return;
  }
  check(!is_capturing(), "KeyValueCache: the memory cannot grow while a CUDA graph is captured: reserve() it before");
  constexpr std::int64_t kLeast = 64;
  const std::int64_t size = needed(std::max({positions, 2 * capacity(), kLeast}));
  std::vector<Tensor> grown;
  for (const std::vector<Tensor>* list : {&keys_, &values_}) {
    for (const Tensor& old : *list) {
      grown.push_back(
          empty({config_.batch, config_.key_heads, size, config_.head_width}, config_.dtype, config_.device));
      if (kept > 0) {
        copy_into(slice(grown.back(), 2, 0, kept), slice(old, 2, 0, kept));
      }
    }
  }
  const auto middle = grown.begin() + static_cast<std::ptrdiff_t>(keys_.size());
  keys_.assign(grown.begin(), middle);
  values_.assign(middle, grown.end());
}

void KeyValueCache::check_layer(std::int64_t layer) const {
  check(layer >= 0 && layer < config_.layers, "KeyValueCache: expected a layer in [0, {}), got {}", config_.layers,
        layer);
}

std::array<Tensor, 2> KeyValueCache::append(std::int64_t layer, const Tensor& keys, const Tensor& values) {
  check_layer(layer);
  check_not_capturing("KeyValueCache::append");
  const Shape expected{config_.batch, config_.key_heads, count_, config_.head_width};
  check(keys.shape() == expected && values.shape() == expected,
        "KeyValueCache: expected keys and values of shape {}, got {} and {}", expected, keys.shape(), values.shape());
  check(keys.device() == config_.device && values.device() == config_.device,
        "KeyValueCache: expected keys and values on {}, got {} and {}", config_.device, keys.device(), values.device());
  reserve(length() + count_);
  const auto at = static_cast<std::size_t>(layer);
  if (length() + count_ <= capacity()) {
    store(keys_[at], keys);
    store(values_[at], values);
    return {slice(keys_[at], 2, 0, length() + count_), slice(values_[at], 2, 0, length() + count_)};
  }
  const std::array<Tensor, 2> all{cat({earlier(keys_[at]), keys}, 2), cat({earlier(values_[at]), values}, 2)};
  store(keys_[at], keys);
  store(values_[at], values);
  return all;
}

// The positions [length − visible, length), in order.
Tensor KeyValueCache::earlier(const Tensor& list) const {
  const std::int64_t begin = (length() - visible()) % capacity();
  const std::int64_t until_end = std::min(visible(), capacity() - begin);
  return cat({slice(list, 2, begin, begin + until_end), slice(list, 2, 0, visible() - until_end)}, 2);
}

// Stores the last positions of `added`, as many as there is memory for.
void KeyValueCache::store(const Tensor& list, const Tensor& added) const {
  const std::int64_t count = std::min(count_, capacity());
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t from = count_ - count + done;
    const std::int64_t to = (length() + from) % capacity();
    const std::int64_t size = std::min(count - done, capacity() - to);
    copy_into(slice(list, 2, to, to + size), slice(added, 2, from, from + size));
    done += size;
  }
}

void KeyValueCache::begin_decode(std::int64_t layer, DecodeAttention& step) {
  check_layer(layer);
  check(can_decode() && (count_ == 1 || can_decode_prompt(count_)),
        "KeyValueCache: decode() is for one new position or a prompt that fits, on CUDA");
  if (count_ > 1) {
    check_not_capturing("KeyValueCache::decode of a prompt");
  }
  reserve(length() + count_);
  const auto at = static_cast<std::size_t>(layer);
  step.keys = keys_[at];
  step.values = values_[at];
  step.length = device_length_;
  step.padding = padding_;
}

Tensor KeyValueCache::attend(const Tensor& queries, const DecodeAttention& step) const {
  const Tensor y = scaled_dot_product_attention(transpose(queries, 1, 2), slice(step.keys, 2, 0, length() + count_),
                                                slice(step.values, 2, 0, length() + count_), attention_options());
  return reshape(transpose(y, 1, 2), {queries.size(0) * count_, step.heads * config_.head_width});
}

Tensor KeyValueCache::decode(std::int64_t layer, DecodeAttention step) {
  begin_decode(layer, step);
  return count_ == 1 ? decode_attention(step) : attend(decode_append(step, length()), step);
}

Tensor KeyValueCache::decode(std::int64_t layer, const Tensor& x, const std::vector<DecodeWeight>& weights,
                             const DecodeLinearOptions& options, DecodeAttention step) {
  const std::int64_t before = capacity();
  begin_decode(layer, step);
  if (count_ == 1) {
    step.qkv = decode_linear(x, weights, options);
    step.settled = capacity() == before;  // otherwise the cached positions were just copied
    return decode_attention(step);
  }
  Rotations& r = rotations_;
  if (!step.frequencies.empty() &&
      (!r.table.defined() || r.frequencies != step.frequencies || r.scale != step.rotary_scale)) {
    r = {.frequencies = step.frequencies,
         .scale = step.rotary_scale,
         .table = decode_rotations(step.frequencies, step.rotary_scale, length(), count_, config_.device)};
  }
  const Tensor rotations = step.frequencies.empty() ? Tensor{} : r.table;
  return attend(decode_linear_append(x, weights, options, step, length(), rotations), step);
}

bool KeyValueCache::prepare(DecoderStep& step) {
  if (!can_decode() || padding_.defined() || static_cast<std::int64_t>(step.layers.size()) != config_.layers) {
    return false;
  }
  reserve(length() + 1);
  for (std::size_t i = 0; i < step.layers.size(); ++i) {
    step.layers[i].keys = keys_[i];
    step.layers[i].values = values_[i];
  }
  if (!has_decoder_step(step)) {
    return false;
  }
  const std::int64_t needed = decoder_step_scratch(step);
  if (!scratch_.defined() || scratch_.numel() < needed) {
    if (is_capturing()) {
      return false;  // each replay would write the zeros again
    }
    scratch_ = zeros({needed}, int64, config_.device);
  }
  step.length = device_length_;
  step.adds_to_length = step_counts_ = true;
  step.scratch = scratch_;
  return true;
}

AttentionOptions KeyValueCache::attention_options() const {
  const bool all_fit = length() + count_ <= capacity();
  const std::int64_t before = all_fit ? length() : visible();
  const bool beyond = config_.window > 0 && before + count_ > config_.window;
  if ((padding_.defined() || beyond) && !mask_.defined()) {
    const auto end = static_cast<double>(length() + count_);
    const Tensor positions = arange(end, int64, config_.device);
    const Tensor keys = slice(positions, 0, length() - before, length() + count_);  // (S)
    if (padding_.defined()) {
      mask_ = reshape(ge(keys, padding_), {config_.batch, 1, 1, before + count_});
    }
    if (beyond) {
      const Tensor queries = unsqueeze(slice(positions, 0, length(), length() + count_), 1);  // (T, 1)
      const Tensor near = gt(keys, queries - config_.window);
      mask_ = mask_.defined() ? logical_and(mask_, near) : near;
    }
  }
  // A single new position attends to all others, so it needs no causal mask.
  return {.causal = count_ > 1, .causal_offset = count_ > 1 ? before : 0, .mask = mask_};
}

}  // namespace mica::nn
