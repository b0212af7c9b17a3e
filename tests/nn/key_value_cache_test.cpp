#include <tests/nn/small_models.h>

#include <algorithm>
#include <functional>
#include <type_traits>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/nn/key_value_cache.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::small_models;

namespace {

template <class Model, class Config>
void expect_cached_logits_as_without(const Config& config, Device device, DType dtype) {
  SCOPED_TRACE(fmt::format("{} {}", device, dtype));
  manual_seed(1);
  const Model model = randomized(Model(config), dtype, device);
  const autograd::NoGrad no_grad;
  const Tensor tokens = randint(0, 13, {3, 17}, int64, device);
  const Tensor expected = model(tokens);
  const double tolerance = tolerance_of(dtype);
  nn::KeyValueCache cache = model.new_cache(3);
  std::int64_t at = 0;
  for (const std::int64_t count : {5, 1, 1, 4, 1, 5}) {
    const Tensor logits = model(slice(tokens, 1, at, at + count), &cache);
    expect_close(logits, slice(expected, 1, at, at + count), tolerance, tolerance, fmt::format("after {}", at));
    at += count;
    EXPECT_EQ(cache.length(), at);
  }
  // Again in the same memory.
  cache.clear();
  expect_close(model.next_token_logits(slice(tokens, 1, 0, 9), &cache), select(expected, 1, 8), tolerance, tolerance);
  expect_close(model.next_token_logits(slice(tokens, 1, 9, 10), &cache), select(expected, 1, 9), tolerance, tolerance);
}

TEST(KeyValueCache, SameLogitsAsWithoutIt) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      expect_cached_logits_as_without<nn::GPT>(gpt_config(), device, dtype);
      expect_cached_logits_as_without<nn::Llama>(llama_config(), device, dtype);
      nn::LlamaConfig half_rotated = llama_config();
      half_rotated.rotated_layers = {true, false};
      expect_cached_logits_as_without<nn::Llama>(half_rotated, device, dtype);
    }
  }
}

template <class Model, class Config>
void expect_padding_without_effect(const Config& config, Device device) {
  manual_seed(2);
  const Model model = randomized(Model(config), float64, device);
  const autograd::NoGrad no_grad;
  const Tokens padding{4, 0, 6};
  const Tensor tokens = randint(0, 13, {3, 12}, int64, device);
  nn::KeyValueCache cache = model.new_cache(3);
  cache.set_padding(padding);
  const Tensor first = model(slice(tokens, 1, 0, 8), &cache);
  const Tensor second = model(slice(tokens, 1, 8, 9), &cache);
  const Tensor third = model(slice(tokens, 1, 9, 12), &cache);
  for (std::int64_t row = 0; row < 3; ++row) {
    const std::int64_t start = padding[static_cast<std::size_t>(row)];
    const Tensor alone = model(slice(slice(tokens, 0, row, row + 1), 1, start, 12));
    const auto of_row = [&](const Tensor& logits) { return slice(logits, 0, row, row + 1); };
    expect_close(slice(of_row(first), 1, start, 8), slice(alone, 1, 0, 8 - start), 1e-11, 1e-11);
    expect_close(of_row(second), slice(alone, 1, 8 - start, 9 - start), 1e-11, 1e-11);
    expect_close(of_row(third), slice(alone, 1, 9 - start, 12 - start), 1e-11, 1e-11);
  }
}

TEST(KeyValueCache, PaddingHasNoEffect) {
  for (const Device device : test_devices()) {
    expect_padding_without_effect<nn::GPT>(gpt_config(), device);
    expect_padding_without_effect<nn::Llama>(llama_config(), device);
  }
}

TEST(KeyValueCache, GrowsPastItsFirstMemory) {
  manual_seed(3);
  nn::LlamaConfig config = llama_config();
  const nn::Llama llama = randomized(nn::Llama(config), float64, Device::cpu());
  const autograd::NoGrad no_grad;
  const Tensor tokens = randint(0, 13, {2, 150});
  nn::KeyValueCache cache = llama.new_cache(2);
  llama(slice(tokens, 1, 0, 60), &cache);
  for (std::int64_t at = 60; at < 149; ++at) {
    llama(slice(tokens, 1, at, at + 1), &cache);
  }
  expect_close(llama.next_token_logits(slice(tokens, 1, 149, 150), &cache), llama.next_token_logits(tokens), 1e-10,
               1e-10);
}

// After clear(), no padding is left: neither in the masks and positions, nor in the length of the longest text.
template <class Model, class Config>
void expect_cleared_padding(const Config& config, Device device) {
  manual_seed(5);
  const Model model = randomized(Model(config), float64, device);
  const autograd::NoGrad no_grad;
  const Tensor tokens = randint(0, 13, {3, 9}, int64, device);
  nn::KeyValueCache cache = model.new_cache(3);
  for (const Tokens& padding : {Tokens{4, 0, 6}, Tokens{3, 5, 2}}) {
    cache.set_padding(padding);
    model(slice(tokens, 1, 0, 7), &cache);
    cache.clear();
    EXPECT_EQ(cache.length(), 0);
    EXPECT_EQ(cache.longest(), 0);
    const Tensor expected = model(tokens);
    expect_close(model(slice(tokens, 1, 0, 8), &cache), slice(expected, 1, 0, 8), 1e-11, 1e-11);
    expect_close(model(slice(tokens, 1, 8, 9), &cache), slice(expected, 1, 8, 9), 1e-11, 1e-11);
    EXPECT_EQ(cache.longest(), 9);
    cache.clear();
  }
}

TEST(KeyValueCache, ClearForgetsThePadding) {
  for (const Device device : test_devices()) {
    expect_cleared_padding<nn::GPT>(gpt_config(), device);
    expect_cleared_padding<nn::Llama>(llama_config(), device);
  }
}

static_assert(!std::is_copy_constructible_v<nn::KeyValueCache> && !std::is_copy_assignable_v<nn::KeyValueCache>);

TEST(KeyValueCache, ClonesAndMoves) {
  manual_seed(18);
  for (const Device device : test_devices()) {
    for (const std::int64_t window : {0, 6}) {
      const nn::Llama llama = randomized(nn::Llama(llama_config()), float64, device);
      const autograd::NoGrad no_grad;
      const Tensor tokens = randint(0, 13, {2, 8}, int64, device);
      const auto part = [&](std::int64_t begin, std::int64_t end) { return slice(tokens, 1, begin, end); };
      nn::KeyValueCache reference = llama.new_cache(2, window);
      reference.set_padding({0, 1});
      const Tensor one = (llama(part(0, 5), &reference), llama(part(5, 6), &reference));
      const Tensor after_one = llama(part(7, 8), &reference);
      reference.clear();
      reference.set_padding({0, 1});
      const Tensor other = (llama(part(0, 5), &reference), llama(part(6, 7), &reference));
      const Tensor after_other = llama(part(7, 8), &reference);

      nn::KeyValueCache cache = llama.new_cache(2, window);
      cache.set_padding({0, 1});
      llama(part(0, 5), &cache);
      nn::KeyValueCache clone = cache.clone();
      EXPECT_EQ(clone.length(), 5);
      expect_close(llama(part(5, 6), &cache), one, 0, 0);
      EXPECT_EQ(clone.length(), 5);
      expect_close(llama(part(6, 7), &clone), other, 0, 0);
      nn::KeyValueCache& gone = cache;
      nn::KeyValueCache moved = std::move(cache);
      expect_close(llama(part(7, 8), &moved), after_one, 0, 0);
      moved.clear();
      EXPECT_EQ(clone.length(), 6);
      expect_close(llama(part(7, 8), &clone), after_other, 0, 0);

      for (const auto& use :
           std::vector<std::function<void()>>{[&] { llama(part(0, 1), &gone); }, [&] { gone.clear(); },
                                              [&] { gone.clone(); }, [&] { gone.reserve(1); },
                                              [&] {
                                                gone.set_padding({0, 0});
                                              }}) {
        expect_error(use, "KeyValueCache: used after it was moved from");
      }
    }
  }
}

// Attention of each position to itself and the window − 1 before it.
TEST(KeyValueCache, AWindowIsARing) {
  manual_seed(14);
  nn::LlamaConfig config = llama_config();
  config.layers = 1;  // with more layers, a position would depend on earlier ones
  for (const Device device : test_devices()) {
    const nn::Llama llama = randomized(nn::Llama(config), float64, device);
    const autograd::NoGrad no_grad;
    const Tensor tokens = randint(0, 13, {2, 40}, int64, device);
    const Tokens padding{0, 3};
    constexpr std::int64_t kWindow = 7;
    nn::KeyValueCache cache = llama.new_cache(2, kWindow);
    cache.set_padding(padding);
    Tensors parts;
    std::int64_t at = 0;
    for (const std::int64_t count : {3, 1, 9, 1, 1, 5, 12, 1, 7}) {
      parts.push_back(llama(slice(tokens, 1, at, at + count), &cache));
      at += count;
    }
    EXPECT_EQ(cache.length(), 40);
    EXPECT_EQ(cache.capacity(), kWindow);
    const Tensor logits = cat(parts, 1);
    for (std::int64_t row = 0; row < 2; ++row) {
      const std::int64_t start = padding[static_cast<std::size_t>(row)];
      for (const std::int64_t position : {3, 6, 7, 12, 13, 20, 31, 39}) {
        const std::int64_t from = std::max(start, position - kWindow + 1);
        const Tensor alone = llama(slice(slice(tokens, 0, row, row + 1), 1, from, position + 1));
        expect_close(select(slice(logits, 0, row, row + 1), 1, position), select(alone, 1, -1), 1e-4, 1e-4,
                     fmt::format("row {} position {}", row, position));
      }
    }
  }
  expect_error([] { nn::KeyValueCache({.window = -1}); }, "expected a window of at least 1, or 0 for none, got -1");
}

// Behind the original context, queries with the long factors meet keys with the short ones until these have left.
TEST(KeyValueCache, LongropeKeepsTheKeysOfAWindow) {
  constexpr std::int64_t kWindow = 7, kOriginal = 16;
  nn::LlamaConfig config = llama_config();
  config.layers = 1;
  config.rotary = {.theta = 100,
                   .scaling = nn::RotaryScaling::longrope,
                   .factor = 4,
                   .original_context = kOriginal,
                   .short_factors = {1, 1.25, 2},
                   .long_factors = {2, 5, 11}};
  nn::LlamaConfig of_short = config, of_long = config;
  of_short.rotary.long_factors = config.rotary.short_factors;
  of_long.rotary.short_factors = config.rotary.long_factors;
  for (const Device device : test_devices()) {
    const auto model = [&](const nn::LlamaConfig& c) {
      manual_seed(16);
      return randomized(nn::Llama(c), float64, device);
    };
    const nn::Llama llama = model(config), with_short = model(of_short), with_long = model(of_long);
    const autograd::NoGrad no_grad;
    const Tensor tokens = randint(0, 13, {1, 40}, int64, device);
    nn::KeyValueCache cache = llama.new_cache(1, kWindow);
    Tensors parts;
    std::int64_t at = 0;
    for (const std::int64_t count : {9, 6, 1, 1, 3, 1, 12, 1, 6}) {
      parts.push_back(llama(slice(tokens, 1, at, at + count), &cache));
      at += count;
    }
    const Tensor logits = cat(parts, 1);
    for (std::int64_t position = 0; position < 40; ++position) {
      const Tensor seen = slice(tokens, 1, std::max(std::int64_t{0}, position - kWindow + 1), position + 1);
      const Tensor got = select(logits, 1, position);
      const auto differs = [&](const nn::Llama& other) {
        return max(abs(got - select(other(seen), 1, -1))).item() > 1e-4;  // angles are float32
      };
      EXPECT_EQ(differs(with_short), position >= kOriginal) << position;
      EXPECT_EQ(differs(with_long), position < kOriginal + kWindow - 1 && position > 0) << position;
    }
  }
}

TEST(KeyValueCache, Errors) {
  const nn::GPT gpt = randomized(nn::GPT(gpt_config()), float32, Device::cpu());
  nn::KeyValueCache cache = gpt.new_cache(2);
  const Tensor tokens = zeros({2, 5}, int64);
  expect_error([&] { gpt(tokens, &cache); }, "KeyValueCache: works without gradients only");
  const autograd::NoGrad no_grad;
  expect_error(
      [&] {
        gpt(zeros({1, 5}, int64), &cache);
      },
      "KeyValueCache: expected tokens of 2 sequences, the cache's batch, got 1");
  const nn::Llama llama = randomized(nn::Llama(llama_config()), float32, Device::cpu());
  nn::KeyValueCache of_three = llama.new_cache(3);
  expect_error(
      [&] {
        llama.next_token_logits(zeros({1, 1}, int64), &of_three);
      },
      "expected tokens of 3 sequences, the cache's batch, got 1");
  expect_error([&] { gpt(zeros({2, 0}, int64), &cache); }, "expected at least 1 new position, got 0");
  expect_error([&] { gpt(zeros({2, 21}, int64), &cache); }, "GPT: expected at most 20 tokens, the context, got 21");
  expect_error([&] { cache.set_padding({1}); }, "expected the padding of 2 sequences, got 1");
  expect_error([&] { cache.set_padding({1, -1}); }, "padding that is not negative");
  expect_error([&] { cache.attend(2, tokens, tokens, tokens); }, "expected a layer in [0, 2), got 2");
  EXPECT_EQ(cache.length(), 0);
  gpt(zeros({2, 18}, int64), &cache);
  expect_error([&] { gpt(zeros({2, 3}, int64), &cache); }, "at most 20 tokens, the context, got 21");
  expect_error([&] { cache.set_padding({0, 0}); }, "an empty cache to set the padding, got one of 18 positions");
  EXPECT_EQ(cache.length(), 18);
  expect_error([] { nn::KeyValueCache({.batch = 0}); },
               "KeyValueCache: expected 0 to 4096 layers and at least 1 sequence");
  expect_error([] { nn::KeyValueCache({.layers = INT64_MAX}); }, "KeyValueCache: expected 0 to 4096 layers");
  expect_error([] { nn::KeyValueCache({.dtype = int64}); }, "KeyValueCache: expected a floating dtype, got int64");
  const nn::MultiheadAttention both_ways(8, {.heads = 2, .causal = false});
  expect_error([&] { both_ways.branch(ones({2, 1, 8}), {}, {&cache, 0}); }, "a cache is for causal attention");
}

TEST(KeyValueCache, DecodeStepsAsAllPositions) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const autograd::NoGrad no_grad;
  for (const std::vector<bool>& rotated_layers : {std::vector<bool>{}, {true, false}}) {
    manual_seed(13);
    nn::LlamaConfig config = wide_llama_config();
    config.qk_norm = config.qkv_bias = true;
    config.rotated_layers = rotated_layers;
    nn::Llama llama = randomized(nn::Llama(config), float32, Device::cuda());
    const Tensor tokens = randint(0, 192, {3, 70}, int64, Device::cuda());
    const Tensor expected = llama(tokens);
    for (const DType dtype : {float32, bfloat16}) {
      llama.to(dtype);
      nn::KeyValueCache cache = llama.new_cache(3);
      llama.next_token_logits(slice(tokens, 1, 0, 60), &cache);
      for (std::int64_t at = 60; at < 70; ++at) {  // grows past its first memory
        const Tensor logits = llama.next_token_logits(slice(tokens, 1, at, at + 1), &cache);
        const double tolerance = dtype == float32 ? 1e-3 : 0.5;
        expect_close(logits, select(expected, 1, at), tolerance, tolerance, fmt::format("{} at {}", dtype, at));
      }
      EXPECT_EQ(cache.length(), 70);
    }
  }
}

}  // namespace
