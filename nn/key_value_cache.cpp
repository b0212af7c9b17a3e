#include <algorithm>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/nn/key_value_cache.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

KeyValueCache::KeyValueCache(const Config& config) : config_(config) {
  check(config.layers >= 0 && config.batch >= 1 && config.key_heads >= 1 && config.head_width >= 1,
        "KeyValueCache: expected at least 0 layers, 1 sequence, 1 head and 1 column, got {}, {}, {} and {}",
        config.layers, config.batch, config.key_heads, config.head_width);
  check(is_floating(config.dtype), "KeyValueCache: expected a floating dtype, got {}", config.dtype);
  keys_.resize(static_cast<std::size_t>(config.layers));
  values_.resize(static_cast<std::size_t>(config.layers));
}

void KeyValueCache::clear() {
  length_ = 0;
  count_ = 0;
  padding_ = positions_ = mask_ = {};
}

void KeyValueCache::set_padding(const std::vector<std::int64_t>& padding) {
  check(length_ == 0, "KeyValueCache: expected an empty cache to set the padding, got one of {} positions", length_);
  check(static_cast<std::int64_t>(padding.size()) == config_.batch,
        "KeyValueCache: expected the padding of {} sequences, got {}", config_.batch, padding.size());
  const bool has_any = std::any_of(padding.begin(), padding.end(), [](std::int64_t n) { return n != 0; });
  check(std::all_of(padding.begin(), padding.end(), [](std::int64_t n) { return n >= 0; }),
        "KeyValueCache: expected padding that is not negative");
  padding_ = has_any ? from_data(padding, {config_.batch, 1}, config_.device) : Tensor{};
}

void KeyValueCache::begin(std::int64_t count) {
  check(!autograd::grad_enabled(), "KeyValueCache: works without gradients only: use autograd::NoGrad");
  check(count >= 1 && count <= INT64_MAX / 4 - length_, "KeyValueCache: expected at least 1 new position, got {}",
        count);
  count_ = count;
  if (padding_.defined()) {
    const Tensor slots = arange(static_cast<double>(length_ + count), int64, config_.device);
    positions_ = maximum(slice(slots, 0, length_, length_ + count) - padding_, 0);
    mask_ = reshape(ge(slots, padding_), {config_.batch, 1, 1, length_ + count});
  }
}

void KeyValueCache::end() {
  length_ += count_;
  count_ = 0;
}

void KeyValueCache::reserve(std::int64_t length) {
  const std::int64_t reserved = keys_[0].defined() ? keys_[0].size(2) : 0;
  if (length <= reserved) {
    return;
  }
  constexpr std::int64_t kLeast = 64;
  const std::int64_t size = std::max({length, 2 * reserved, kLeast});
  std::vector<Tensor> grown;
  for (const std::vector<Tensor>* list : {&keys_, &values_}) {
    for (const Tensor& old : *list) {
      grown.push_back(
          empty({config_.batch, config_.key_heads, size, config_.head_width}, config_.dtype, config_.device));
      if (length_ > 0) {
        copy_into(slice(grown.back(), 2, 0, length_), slice(old, 2, 0, length_));
      }
    }
  }
  const auto middle = grown.begin() + static_cast<std::ptrdiff_t>(keys_.size());
  keys_.assign(grown.begin(), middle);
  values_.assign(middle, grown.end());
}

std::array<Tensor, 2> KeyValueCache::append(std::int64_t layer, const Tensor& keys, const Tensor& values) {
  check(layer >= 0 && layer < config_.layers, "KeyValueCache: expected a layer in [0, {}), got {}", config_.layers,
        layer);
  const Shape expected{config_.batch, config_.key_heads, count_, config_.head_width};
  check(keys.shape() == expected && values.shape() == expected,
        "KeyValueCache: expected keys and values of shape {}, got {} and {}", expected, keys.shape(), values.shape());
  check(keys.device() == config_.device && values.device() == config_.device,
        "KeyValueCache: expected keys and values on {}, got {} and {}", config_.device, keys.device(), values.device());
  const std::int64_t total = length_ + count_;
  reserve(total);
  const auto at = static_cast<std::size_t>(layer);
  copy_into(slice(keys_[at], 2, length_, total), keys);
  copy_into(slice(values_[at], 2, length_, total), values);
  return {slice(keys_[at], 2, 0, total), slice(values_[at], 2, 0, total)};
}

AttentionOptions KeyValueCache::attention_options() const {
  // A single new position sees all others.
  return {.causal = count_ > 1, .causal_offset = count_ > 1 ? length_ : 0, .mask = mask_};
}

}  // namespace mica::nn
