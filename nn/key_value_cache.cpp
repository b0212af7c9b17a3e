#include <algorithm>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/nn/key_value_cache.h>
#include <mica/ops/decode_attention/decode_attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

KeyValueCache::KeyValueCache(const Config& config)
    : config_(config),
      steps_on_device_(!config.scale && config.cap == 0 &&
                       has_decode_attention(config.dtype, config.head_width, config.device)) {
  check(config.layers >= 0 && config.layers <= detail::kMostLayers && config.batch >= 1 && config.key_heads >= 1 &&
            config.head_width >= 1,
        "KeyValueCache: expected 0 to {} layers and at least 1 sequence, 1 head and 1 column, got {}, {}, {} and {}",
        detail::kMostLayers, config.layers, config.batch, config.key_heads, config.head_width);
  check(is_floating(config.dtype), "KeyValueCache: expected a floating dtype, got {}", config.dtype);
  check(config.window >= 0, "KeyValueCache: expected a window of at least 1, or 0 for none, got {}", config.window);
  check(config.windows.empty() || static_cast<std::int64_t>(config.windows.size()) == config.layers,
        "KeyValueCache: expected windows of all {} layers or of none, got {}", config.layers, config.windows.size());
  for (const std::int64_t window : config.windows) {
    check(window >= 0, "KeyValueCache: expected windows of at least 1, or 0 for none, got {}", window);
  }
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
  result.count_ = 0;  // a step that has not ended is not copied
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
  if (!(steps_on_device_ && count == 1)) {
    check_not_capturing("KeyValueCache::begin");
  }
  count_ = count;
  positions_ = mask_ = {};
}

void KeyValueCache::end(bool counted) {
  if (device_length_.defined() && !counted) {
    add_(device_length_, one_, static_cast<double>(count_));
  }
  on_each_replay([length = length_, count = count_] { *length += count; });
  count_ = 0;
}

const Tensor& KeyValueCache::positions() const {
  if (positions_.defined()) {
    return positions_;
  }
  if (steps_on_device_ && count_ == 1) {
    const Tensor length = reshape(device_length_, {1, 1});
    positions_ =
        padding_.defined() ? maximum(length - padding_, 0) : contiguous_data(expand(length, {config_.batch, 1}));
  } else if (padding_.defined()) {
    const Tensor all = arange(static_cast<double>(length() + count_), int64, config_.device);
    positions_ = maximum(slice(all, 0, length(), length() + count_) - padding_, 0);
  }
  return positions_;
}

std::int64_t KeyValueCache::longest() const {
  check_not_capturing("KeyValueCache::longest");
  return length() + count_ - least_padding_;
}

std::int64_t KeyValueCache::capacity() const {
  std::int64_t most = 0;
  for (std::size_t at = 0; at < keys_.size(); ++at) {
    most = std::max(most, capacity_at(at));
  }
  return most;
}

bool KeyValueCache::keeps_all(std::int64_t count) const {
  for (std::size_t at = 0; at < keys_.size(); ++at) {
    if (needed(at, length() + count) < length() + count) {
      return false;
    }
  }
  return true;
}

bool KeyValueCache::reserve(std::int64_t positions) {
  const std::int64_t kept = length();
  bool suffices = true;
  for (std::size_t at = 0; at < keys_.size(); ++at) {
    suffices = suffices && needed(at, positions) <= capacity_at(at);
  }
  if (suffices) {
    return false;
  }
  check(!is_capturing(), "KeyValueCache: the memory cannot grow while a CUDA graph is captured: reserve() it before");
  constexpr std::int64_t kLeast = 64;
  const std::int64_t size = std::max({positions, 2 * capacity(), kLeast});
  std::vector<Tensor> keys = keys_, values = values_;
  for (std::vector<Tensor>* const list : {&keys, &values}) {
    for (std::size_t at = 0; at < list->size(); ++at) {
      if (needed(at, positions) <= capacity_at(at)) {
        continue;
      }
      const Tensor grown = empty({config_.batch, config_.key_heads, needed(at, size), config_.head_width},
                                 config_.dtype, config_.device);
      if (kept > 0) {
        copy_into(slice(grown, 2, 0, kept), slice((*list)[at], 2, 0, kept));
      }
      (*list)[at] = grown;
    }
  }
  keys_ = std::move(keys);
  values_ = std::move(values);
  return true;
}

std::size_t KeyValueCache::index_of(std::int64_t layer) const {
  check(layer >= 0 && layer < config_.layers, "KeyValueCache: expected a layer in [0, {}), got {}", config_.layers,
        layer);
  return static_cast<std::size_t>(layer);
}

Tensor KeyValueCache::attend(std::int64_t layer, const Tensor& q, const Tensor& k, const Tensor& v) {
  const std::size_t at = index_of(layer);
  const Shape expected{config_.batch, config_.key_heads, count_, config_.head_width};
  check(k.shape() == expected && v.shape() == expected,
        "KeyValueCache: expected keys and values of shape {}, got {} and {}", expected, k.shape(), v.shape());
  check(k.device() == config_.device && v.device() == config_.device,
        "KeyValueCache: expected keys and values on {}, got {} and {}", config_.device, k.device(), v.device());
  reserve(length() + count_);
  if (steps_on_device_ && count_ == 1) {
    const auto rows = [&](const Tensor& x) { return reshape(x, {config_.batch, x.size(1) * config_.head_width}); };
    return unsqueeze(decode_attention({.q = rows(q),
                                       .k = rows(k),
                                       .v = rows(v),
                                       .heads = q.size(1),
                                       .keys = keys_[at],
                                       .values = values_[at],
                                       .length = device_length_,
                                       .padding = padding_}),
                     1);
  }
  if (length() + count_ <= capacity_at(at)) {
    store(keys_[at], k);
    store(values_[at], v);
    return attend_stored(layer, q);
  }
  const std::int64_t visible = std::min(length(), window_at(at) - 1);  // earlier positions that the first new one sees
  const Tensor keys = cat({earlier(keys_[at], visible), k}, 2), values = cat({earlier(values_[at], visible), v}, 2);
  store(keys_[at], k);
  store(values_[at], v);
  return attend_to(at, q, keys, values);
}

Tensor KeyValueCache::attend_stored(std::int64_t layer, const Tensor& q) const {
  const std::size_t at = index_of(layer);
  const std::int64_t end = length() + count_;
  return attend_to(at, q, slice(keys_[at], 2, 0, end), slice(values_[at], 2, 0, end));
}

// The positions [length − visible, length), in order.
Tensor KeyValueCache::earlier(const Tensor& list, std::int64_t visible) const {
  const std::int64_t capacity = list.size(2), begin = (length() - visible) % capacity;
  const std::int64_t until_end = std::min(visible, capacity - begin);
  return cat({slice(list, 2, begin, begin + until_end), slice(list, 2, 0, visible - until_end)}, 2);
}

// Stores the last positions of `added`, as many as there is memory for.
void KeyValueCache::store(const Tensor& list, const Tensor& added) const {
  const std::int64_t capacity = list.size(2), count = std::min(count_, capacity);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t from = count_ - count + done;
    const std::int64_t to = (length() + from) % capacity;
    const std::int64_t size = std::min(count - done, capacity - to);
    copy_into(slice(list, 2, to, to + size), slice(added, 2, from, from + size));
    done += size;
  }
}

Tensor KeyValueCache::attend_to(std::size_t at, const Tensor& q, const Tensor& keys, const Tensor& values) const {
  const std::int64_t end = length() + count_, before = keys.size(2) - count_;
  if (padding_.defined() && !mask_.defined()) {
    mask_ = reshape(ge(arange(static_cast<double>(end), int64, config_.device), padding_), {config_.batch, 1, 1, end});
  }
  // A single new position attends to all others, so it needs no causal mask.
  const bool causal = count_ > 1;
  const Tensor y =
      scaled_dot_product_attention(q, keys, values,
                                   {.causal = causal,
                                    .causal_offset = causal ? before : 0,
                                    .window = causal ? window_at(at) : 0,
                                    .scale = config_.scale,
                                    .cap = config_.cap,
                                    .mask = mask_.defined() ? slice(mask_, 3, end - keys.size(2), end) : Tensor{}});
  return reshape(transpose(y, 1, 2), {q.size(0), count_, q.size(1) * q.size(3)});
}

}  // namespace mica::nn
