#include <tests/nn/small_models.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <type_traits>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/launch_record.h>
#include <mica/core/rng.h>
#include <mica/nn/generate.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::small_models;

namespace {

using Values = std::vector<double>;

TEST(Generate, AWindowOfTheWholeTextChangesNothing) {
  manual_seed(15);
  nn::Llama llama = randomized(nn::Llama(llama_config()), float64, Device::cpu());
  const nn::SamplingOptions greedy{.temperature = 0};
  const std::vector<Tokens> expected = nn::generate(llama, kPrompts, {.count = 40, .sampling = greedy});
  EXPECT_EQ(nn::generate(llama, kPrompts, {.count = 40, .sampling = greedy, .window = 48}), expected);
  EXPECT_NE(nn::generate(llama, kPrompts, {.count = 40, .sampling = greedy, .window = 3}), expected);
}

// The reference: one text after the other, with all positions computed again for each token.
template <class Model>
std::vector<Tokens> computed_again(const Model& model, const std::vector<Tokens>& prompts, std::int64_t count,
                                   std::int64_t context) {
  const autograd::NoGrad no_grad;
  std::vector<Tokens> results;
  for (const Tokens& prompt : prompts) {
    Tokens text = prompt;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t length = std::min(context, static_cast<std::int64_t>(text.size()));
      const Tokens window(text.end() - length, text.end());
      const Tensor logits = model.next_token_logits(from_data(window, {1, length}, model.parameters()[0].device()));
      text.push_back(static_cast<std::int64_t>(argmax(logits).item()));
    }
    results.emplace_back(text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end());
  }
  return results;
}

TEST(Generate, AsByComputingAllPositionsAgain) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    nn::GPT gpt = randomized(nn::GPT(gpt_config()), float64, device);
    nn::Llama llama = randomized(nn::Llama(llama_config()), float64, device);
    const nn::GenerateOptions greedy{.count = 20, .sampling = {.temperature = 0}};
    EXPECT_EQ(nn::generate(llama, kPrompts, greedy), computed_again(llama, kPrompts, 20, 1000));
    EXPECT_EQ(nn::generate(gpt, kPrompts, greedy), computed_again(gpt, kPrompts, 20, 20));  // past the context
    const Tensor extended =
        nn::generate(llama, from_data<std::int64_t>({7, 7}, {2, 1}, device), 20, {.temperature = 0});
    EXPECT_EQ(extended.device(), device);
    const Tokens expected = nn::generate(llama, {{7}}, greedy)[0];
    EXPECT_EQ(to_vector<std::int64_t>(slice(select(extended, 0, 1), 0, 1, 21)), expected);
    EXPECT_EQ(nn::generate(gpt, {}, greedy), std::vector<Tokens>{});
  }
}

TEST(Generate, SameTokensOnBothDevices) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  manual_seed(5);
  nn::Llama llama = randomized(nn::Llama(llama_config()), float64, Device::cpu());
  for (const nn::SamplingOptions& sampling :
       {nn::SamplingOptions{.seed = 1}, nn::SamplingOptions{.temperature = 0.7, .top_k = 5, .seed = 2},
        nn::SamplingOptions{.top_p = 0.8, .repetition_penalty = 1.2, .seed = 3}}) {
    llama.to(Device::cpu());
    const std::vector<Tokens> expected = nn::generate(llama, kPrompts, {.count = 40, .sampling = sampling});
    llama.to(Device::cuda());
    EXPECT_EQ(nn::generate(llama, kPrompts, {.count = 40, .sampling = sampling}), expected);
  }
}

TEST(Generate, SameTokensWithAndWithoutAGraph) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  for (const DType dtype : {float32, bfloat16}) {
    SCOPED_TRACE(fmt::format("{}", dtype));
    manual_seed(12);
    nn::Llama llama = randomized(nn::Llama(wide_llama_config()), dtype, Device::cuda());
    nn::GPT gpt =
        randomized(nn::GPT({.vocab = 192, .context = 90, .layers = 2, .heads = 2, .width = 64}), dtype, Device::cuda());
    for (const nn::SamplingOptions& sampling :
         {nn::SamplingOptions{.temperature = 0}, nn::SamplingOptions{.temperature = 0.7, .seed = 2},
          nn::SamplingOptions{.top_k = 9, .top_p = 0.8, .repetition_penalty = 1.2, .seed = 3}}) {
      nn::GenerateOptions options{.count = 100, .sampling = sampling, .cuda_graph = false};
      const std::vector<Tokens> expected = nn::generate(llama, kPrompts, options);
      const std::vector<Tokens> expected_of_gpt = nn::generate(gpt, kPrompts, options);  // past the context
      options.cuda_graph = true;
      cuda::LaunchRecord record;
      EXPECT_EQ(nn::generate(llama, kPrompts, options), expected);
      EXPECT_TRUE(record.has("cuda_graph"));
      record.clear();
      EXPECT_EQ(nn::generate(gpt, kPrompts, options), expected_of_gpt);
      EXPECT_TRUE(record.has("cuda_graph"));
    }
    if (dtype == float32) {
      const nn::GenerateOptions options{.count = 60, .sampling = {.temperature = 0.7, .top_k = 20, .seed = 5}};
      const std::vector<Tokens> on_device = nn::generate(llama, kPrompts, options);
      llama.to(Device::cpu());
      EXPECT_EQ(nn::generate(llama, kPrompts, options), on_device);
      nn::GenerateOptions windowed = options;
      windowed.window = 9;
      const std::vector<Tokens> on_host = nn::generate(llama, kPrompts, windowed);
      llama.to(Device::cuda());
      EXPECT_EQ(nn::generate(llama, kPrompts, windowed), on_host);
    }
  }
}

TEST(Generate, QuantizedModelsWriteTheSameTokensOnBothDevices) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  for (const int bits : {8, 4}) {
    SCOPED_TRACE(fmt::format("{} bits", bits));
    manual_seed(15);
    // float64, so that rounding does not decide between two tokens.
    nn::Llama llama = randomized(nn::Llama(llama_config()), float64, Device::cpu());
    nn::GPT gpt = randomized(nn::GPT(gpt_config()), float64, Device::cpu());
    nn::quantize(llama, {.bits = bits});
    nn::quantize(gpt, {.bits = bits});
    const nn::GenerateOptions options{.count = 30, .sampling = {.temperature = 0.7, .top_k = 5, .seed = 2}};
    const std::vector<Tokens> expected = nn::generate(llama, kPrompts, options);
    const std::vector<Tokens> expected_of_gpt = nn::generate(gpt, kPrompts, options);
    llama.to(Device::cuda());
    gpt.to(Device::cuda());
    EXPECT_EQ(nn::generate(llama, kPrompts, options), expected);
    EXPECT_EQ(nn::generate(gpt, kPrompts, options), expected_of_gpt);
  }
}

TEST(Generate, QuantizedModelsWriteTheSameTokensWithAndWithoutAGraph) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  for (const DType dtype : {float32, bfloat16}) {
    for (const int bits : {8, 4}) {
      SCOPED_TRACE(fmt::format("{}, {} bits", dtype, bits));
      manual_seed(16);
      nn::Llama llama = randomized(nn::Llama(wide_llama_config()), dtype, Device::cuda());
      nn::quantize(llama, {.bits = bits});
      nn::GenerateOptions options{.count = 60, .sampling = {.temperature = 0.7, .seed = 2}, .cuda_graph = false};
      const std::vector<Tokens> expected = nn::generate(llama, kPrompts, options);
      options.cuda_graph = true;
      const cuda::LaunchRecord record;
      EXPECT_EQ(nn::generate(llama, kPrompts, options), expected);
      EXPECT_TRUE(record.has("cuda_graph"));
    }
  }
}

TEST(Generate, QuantizedModelsWriteTheTokensOfTheWeightsThatTheyRepresent) {
  nn::LlamaConfig config = llama_config();
  config.tied_head = false;  // the embedding is not quantized
  for (const Device device : test_devices()) {
    for (const int bits : {8, 4}) {
      SCOPED_TRACE(fmt::format("{}, {} bits", device, bits));
      manual_seed(17);
      nn::Llama llama = randomized(nn::Llama(config), float64, device);
      nn::Llama rounded(config);
      rounded.to(device, float64);
      rounded.load_state_dict(llama.state_dict());
      const nn::GenerateOptions options{.count = 30, .sampling = {.temperature = 0.7, .top_k = 5, .seed = 2}};
      const std::vector<Tokens> before = nn::generate(rounded, kPrompts, options);
      nn::quantize(llama, {.bits = bits});
      const std::vector<nn::AdaptedLayer> layers = nn::linear_layers(llama), same = nn::linear_layers(rounded);
      ASSERT_EQ(layers.size(), 15u);
      for (std::size_t i = 0; i < layers.size(); ++i) {
        same[i].layer->weight.set_data(contiguous(transpose(dequantize(layers[i].layer->quantized, float64), 0, 1)));
      }
      const std::vector<Tokens> expected = nn::generate(rounded, kPrompts, options);
      EXPECT_NE(expected, before);
      EXPECT_EQ(nn::generate(llama, kPrompts, options), expected);
    }
  }
}

TEST(Generate, OneTextInOneKernel) {
  if (!cuda_available() || !has_prompt_kernels(bfloat16, 64, Device::cuda())) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  manual_seed(14);
  nn::LlamaConfig config = wide_llama_config();
  config.head_width = 64;
  nn::Llama llama = randomized(nn::Llama(config), bfloat16, Device::cuda());
  const std::vector<Tokens> prompt{{3, 1, 4, 1, 5}};
  for (const std::int64_t window : {0, 20}) {
    nn::GenerateOptions options{.count = 100, .sampling = {.temperature = 0.7, .seed = 2}, .window = window};
    options.cuda_graph = false;
    cuda::LaunchRecord record;
    const std::vector<Tokens> expected = nn::generate(llama, prompt, options);
    EXPECT_TRUE(record.has("decoder_step_kernel"));
    options.cuda_graph = true;
    EXPECT_EQ(nn::generate(llama, prompt, options), expected);
    EXPECT_TRUE(record.has("cuda_graph"));
  }
}

TEST(Generate, LargestLogitInOneKernel) {
  if (!cuda_available() || !has_prompt_kernels(bfloat16, 64, Device::cuda())) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  manual_seed(15);
  const autograd::NoGrad no_grad;
  nn::LlamaConfig config = wide_llama_config();
  config.head_width = 64;
  const std::vector<Tokens> prompt{{3, 1, 4, 1, 5}};
  constexpr std::int64_t kCount = 100;
  for (const int bits : {16, 8, 4}) {
    for (const DType dtype : {float16, bfloat16}) {
      SCOPED_TRACE(fmt::format("{} bits, {}", bits, dtype));
      nn::Llama llama = randomized(nn::Llama(config), dtype, Device::cuda());
      if (bits != 16) {
        nn::quantize(llama, {.bits = bits});
      }
      for (const std::int64_t window : {0, 20}) {
        // Computed from the same kernel's logits.
        nn::KeyValueCache cache = llama.new_cache(1, window);
        cache.reserve(kCount + 5);
        Tensor token = argmax(llama.next_token_logits(from_data(prompt[0], {1, 5}, Device::cuda()), cache), 1, true);
        Tokens expected;
        for (std::int64_t i = 0; i < kCount; ++i) {
          expected.push_back(static_cast<std::int64_t>(token.item()));
          token = argmax(llama.next_token_logits(token, cache), 1, true);
        }
        nn::GenerateOptions options{
            .count = kCount, .sampling = {.temperature = 0}, .window = window, .cuda_graph = false};
        cuda::LaunchRecord record;
        EXPECT_EQ(nn::generate(llama, prompt, options)[0], expected);
        const std::vector<std::string> names = record.names();
        EXPECT_EQ(std::count(names.begin(), names.end(), "decoder_step_kernel"), kCount - 1);
        const auto draws = [](const std::string& name) { return name.starts_with("draw_"); };
        EXPECT_LE(std::count_if(names.begin(), names.end(), draws), 1);  // after the prompt
        EXPECT_EQ(names.back(), "decoder_step_kernel");
        options.cuda_graph = true;
        EXPECT_EQ(nn::generate(llama, prompt, options)[0], expected);
        EXPECT_TRUE(record.has("cuda_graph"));
        options.sampling = {.top_k = 1};
        EXPECT_EQ(nn::generate(llama, prompt, options)[0], expected);
      }
    }
  }
}

// If logits are not finite, the next step is launched before the host knows.
TEST(Generate, LogitsThatAreNotFiniteInOneKernel) {
  if (!cuda_available() || !has_prompt_kernels(bfloat16, 64, Device::cuda())) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  manual_seed(16);
  nn::LlamaConfig config = wide_llama_config();
  config.head_width = 64;
  config.tied_head = false;
  nn::Llama llama = randomized(nn::Llama(config), bfloat16, Device::cuda());
  const nn::GenerateOptions options{.count = 40, .sampling = {.temperature = 0}};
  const Tokens expected = nn::generate(llama, {{3, 1, 4}}, options)[0];
  // A token with an embedding that is not finite: the text is unchanged until that token is drawn.
  const auto bad =
      std::find_if(expected.begin(), expected.end(), [](std::int64_t t) { return t != 3 && t != 1 && t != 4; });
  ASSERT_LT(bad - expected.begin(), 39);
  const auto first = bad - expected.begin();
  fill_data(slice(llama.model.embed_tokens.weight.detach(), 0, *bad, *bad + 1), NAN);
  expect_error(
      [&] {
        nn::generate(llama, {{3, 1, 4}}, options);
      },
      fmt::format("the logits after {} tokens of text 0 are not finite", 3 + first + 1));
}

// Its frequencies change on the way, so no step is captured.
TEST(Generate, LongropeWritesTheSameTokensOnBothDevices) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  manual_seed(17);
  nn::LlamaConfig config = wide_llama_config();
  config.rotary = {.theta = 100,
                   .scaling = nn::RotaryScaling::longrope,
                   .factor = 4,
                   .original_context = 20,
                   .short_factors = std::vector<double>(static_cast<std::size_t>(config.head_width / 2), 1.25),
                   .long_factors = std::vector<double>(static_cast<std::size_t>(config.head_width / 2), 6)};
  nn::Llama llama = randomized(nn::Llama(config), float32, Device::cuda());
  const nn::GenerateOptions options{.count = 60, .sampling = {.temperature = 0.7, .top_k = 20, .seed = 5}};
  cuda::LaunchRecord record;
  const std::vector<Tokens> on_device = nn::generate(llama, kPrompts, options);
  EXPECT_FALSE(record.has("cuda_graph"));
  llama.to(Device::cpu());
  EXPECT_EQ(nn::generate(llama, kPrompts, options), on_device);
}

// Texts end with a stop token, or when the callback returns false. On CUDA the next step is already running then.
void expect_stops(nn::Llama& llama, const std::vector<Tokens>& prompts, const nn::SamplingOptions& sampling) {
  const std::vector<Tokens> all = nn::generate(llama, prompts, {.count = 30, .sampling = sampling});
  const std::size_t last = prompts.size() - 1;
  const Tokens stops{all[0][7], all[last][3]};
  for (const std::size_t most : {std::size_t{30}, std::size_t{2}}) {  // tokens of the last text
    std::vector<Tokens> seen(prompts.size());
    const std::vector<Tokens> stopped = nn::generate(llama, prompts,
                                                     {.count = 30,
                                                      .sampling = sampling,
                                                      .stop_tokens = stops,
                                                      .on_token = [&](std::size_t prompt, std::int64_t token) {
                                                        seen[prompt].push_back(token);
                                                        return prompt != last || seen[last].size() < most;
                                                      }});
    EXPECT_EQ(seen, stopped);
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const auto stop = std::find_first_of(all[i].begin(), all[i].end(), stops.begin(), stops.end());
      Tokens expected(all[i].begin(), stop == all[i].end() ? stop : stop + 1);
      if (i == last) {
        expected.resize(std::min(expected.size(), most));
      }
      EXPECT_EQ(stopped[i], expected) << "text " << i << ", at most " << most;
    }
  }
}

TEST(Generate, StopTokensAndCallback) {
  for (const Device device : test_devices()) {
    SCOPED_TRACE(fmt::format("{}", device));
    manual_seed(6);
    nn::Llama llama = randomized(nn::Llama(llama_config()), float64, device);
    expect_stops(llama, kPrompts, {.seed = 9});
    nn::LlamaConfig config = wide_llama_config();
    config.head_width = 64;
    nn::Llama wide = randomized(nn::Llama(config), bfloat16, device);
    for (const nn::SamplingOptions& sampling :
         {nn::SamplingOptions{.seed = 9}, nn::SamplingOptions{.temperature = 0, .repetition_penalty = 3}}) {
      expect_stops(wide, kPrompts, sampling);
      expect_stops(wide, {kPrompts[0]}, sampling);
    }
    expect_stops(wide, {kPrompts[0]}, {.temperature = 0});  // one kernel for each step
  }
}

TEST(Generate, KeepsTheModeAndRecordsNothing) {
  manual_seed(7);
  nn::GPT gpt(gpt_config());
  const Tensor tokens = nn::generate(gpt, zeros({1, 1}, int64), 3);
  EXPECT_TRUE(gpt.is_training());
  EXPECT_FALSE(tokens.requires_grad());
}

std::vector<bool> modes_of(nn::Module& module) {
  std::vector<bool> modes;
  for (const nn::NamedModule& part : module.named_modules()) {
    modes.push_back(part.module->is_training());
  }
  return modes;
}

TEST(Generate, ChangesNoModulesMode) {
  manual_seed(17);
  nn::GPT gpt = randomized(nn::GPT(gpt_config()), float64, Device::cpu());
  const nn::GenerateOptions greedy{.count = 8, .sampling = {.temperature = 0}};
  const std::vector<Tokens> expected = nn::generate(gpt, kPrompts, greedy);
  for (const bool training : {true, false}) {
    gpt.train(training);
    gpt.h[1].train(!training);
    const std::vector<bool> modes = modes_of(gpt);
    EXPECT_NE(std::count(modes.begin(), modes.end(), true), 0);
    EXPECT_NE(std::count(modes.begin(), modes.end(), false), 0);
    EXPECT_EQ(nn::generate(gpt, kPrompts, greedy), expected);  // without dropout
    EXPECT_EQ(modes_of(gpt), modes);

    nn::GenerateOptions throws = greedy;
    throws.on_token = [&](std::size_t, std::int64_t) -> bool {
      const std::vector<bool> here = modes_of(gpt);
      EXPECT_EQ(std::count(here.begin(), here.end(), true), 0);
      std::vector<bool> elsewhere;  // where the model may be training
      std::thread([&] { elsewhere = modes_of(gpt); }).join();
      EXPECT_EQ(elsewhere, modes);
      fail("the callback failed");
    };
    expect_error([&] { nn::generate(gpt, kPrompts, throws); }, "the callback failed");
    EXPECT_EQ(modes_of(gpt), modes);
    EXPECT_TRUE(autograd::grad_enabled());
  }
}

TEST(Generate, Errors) {
  manual_seed(8);
  nn::Llama llama = randomized(nn::Llama(llama_config()), float32, Device::cpu());
  expect_error(
      [&] {
        nn::generate(llama, {{1}, {}});
      },
      "expected at least one token in each prompt, got none in number 1");
  expect_error([&] { nn::generate(llama, {{1, 13}}); }, "expected tokens in [0, 13), got 13 in prompt 0");
  expect_error([&] { nn::generate(llama, {{1}}, {.count = -1}); }, "expected from 0 to 16777216 new tokens, got -1");
  expect_error([&] { nn::generate(llama, {{1}}, {.sampling = {.top_p = 0}}); }, "expected top_p in (0, 1], got 0");
  llama.lm_head.weight.set_data(full(llama.lm_head.weight.shape(), NAN));
  expect_error([&] { nn::generate(llama, {{1, 2}}); }, "the logits after 2 tokens of text 0 are not finite");
}

// The reference: a row's candidates with their probabilities, in the order in which Sampler goes through them.
std::vector<std::pair<std::int64_t, double>> candidates_of(Values logits, const std::vector<bool>& seen,
                                                           const nn::SamplingOptions& o) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (seen[i]) {
      logits[i] = logits[i] > 0 ? logits[i] / o.repetition_penalty : logits[i] * o.repetition_penalty;
    }
  }
  std::vector<std::pair<std::int64_t, double>> result;
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    result.emplace_back(i, std::exp(logits[i] / o.temperature));
    total += result.back().second;
  }
  const bool ordered = (o.top_k > 0 && o.top_k < static_cast<std::int64_t>(logits.size())) || o.top_p < 1;
  if (ordered) {
    std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  }
  if (o.top_k > 0) {
    result.resize(std::min(result.size(), static_cast<std::size_t>(o.top_k)));
    total = 0;
    for (const auto& [token, weight] : result) {
      total += weight;
    }
  }
  double sum = 0;
  std::size_t kept = 0;
  while (kept < result.size() && sum < o.top_p * total) {
    sum += result[kept++].second;
  }
  result.resize(kept);
  for (auto& [token, weight] : result) {
    weight /= sum;
  }
  return result;
}

// A copy would draw from the same random numbers.
static_assert(!std::is_copy_constructible_v<nn::Sampler> && !std::is_copy_assignable_v<nn::Sampler>);

TEST(Sampler, DrawsFromTheCandidates) {
  manual_seed(9);
  constexpr std::int64_t kRows = 4000, kVocab = 9;
  const Tensor row = randn({1, kVocab}, float64) * 2;
  const Values logits = to_vector<double>(row);
  std::vector<bool> seen(kVocab);
  seen[1] = seen[4] = seen[5] = true;
  const Tensor seen_row = from_data<std::int64_t>({0, 1, 0, 0, 1, 1, 0, 0, 0}, {1, kVocab}).to(boolean);
  for (const Device device : test_devices()) {
    for (const nn::SamplingOptions& options :
         {nn::SamplingOptions{}, nn::SamplingOptions{.temperature = 0.6}, nn::SamplingOptions{.top_k = 4},
          nn::SamplingOptions{.top_p = 0.7}, nn::SamplingOptions{.top_p = 1e-9},
          nn::SamplingOptions{.temperature = 1.5, .top_k = 6, .top_p = 0.8, .repetition_penalty = 1.7},
          nn::SamplingOptions{.repetition_penalty = 0.5}}) {
      nn::Sampler sampler(options);
      const Tensor tokens =
          sampler.draw(expand(row, {kRows, kVocab}).to(device), expand(seen_row, {kRows, kVocab}).to(device));
      EXPECT_EQ(tokens.device(), device);
      EXPECT_EQ(tokens.shape(), (Shape{kRows}));
      std::vector<double> share(kVocab), expected(kVocab);
      for (const std::int64_t token : to_vector<std::int64_t>(tokens)) {
        ASSERT_TRUE(token >= 0 && token < kVocab) << token;
        share[static_cast<std::size_t>(token)] += 1.0 / kRows;
      }
      const std::vector<bool> penalized = options.repetition_penalty == 1 ? std::vector<bool>(kVocab) : seen;
      for (const auto& [token, probability] : candidates_of(logits, penalized, options)) {
        expected[static_cast<std::size_t>(token)] = probability;
      }
      for (std::size_t i = 0; i < kVocab; ++i) {
        EXPECT_NEAR(share[i], expected[i], expected[i] == 0 ? 0 : 0.035) << i;
      }
    }
  }
}

TEST(Sampler, SameTokensOnBothDevices) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  manual_seed(10);
  // Includes many equal scores, and more candidates than one batch of the kernel.
  const Tensors cases{randn({300, 5000}) * 3, (randn({20, 9001}) * 2).to(bfloat16), zeros({5, 3000}),
                      (randn({3, 40000}) * 0.01).to(float16), randn({7, 11}, float64)};
  for (const Tensor& logits : cases) {
    const Tensor seen = lt(rand(logits.shape()), 0.3);
    for (const nn::SamplingOptions& options :
         {nn::SamplingOptions{.seed = 1}, nn::SamplingOptions{.temperature = 0}, nn::SamplingOptions{.top_k = 50},
          nn::SamplingOptions{.top_k = 2500}, nn::SamplingOptions{.temperature = 0.8, .top_p = 0.9},
          nn::SamplingOptions{.temperature = 5, .top_p = 0.99},
          nn::SamplingOptions{.temperature = 0.7, .top_k = 300, .top_p = 0.5, .repetition_penalty = 1.3}}) {
      SCOPED_TRACE(fmt::format("{} {}, temperature {}, top_k {}, top_p {}", logits.dtype(), logits.shape(),
                               options.temperature, options.top_k, options.top_p));
      nn::Sampler host(options), device(options);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(device(logits.to(Device::cuda()), seen.to(Device::cuda())), host(logits, seen));
      }
    }
  }
}

TEST(Sampler, PenaltiesLowerNegativeLogits) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float64}) {
      const auto drawn = [&](const Values& logits, double penalty) {
        const Tensor row = from_data(logits, {1, 2}, device).to(dtype);
        const Tensor seen = from_data<std::int64_t>({1, 0}, {1, 2}, device).to(boolean);
        return nn::Sampler({.temperature = 0, .repetition_penalty = penalty})(row, seen)[0];
      };
      EXPECT_EQ(drawn({-1, -1.5}, 2), 1);    // −2 and −1.5
      EXPECT_EQ(drawn({-2, -1.5}, 0.5), 0);  // −1 and −1.5
      EXPECT_EQ(drawn({1.5, 1}, 2), 1);      // 0.75 and 1
      EXPECT_EQ(drawn({0.75, 1}, 0.5), 0);   // 1.5 and 1
    }
  }
}

TEST(Sampler, MoreErrors) {
  expect_error([] { nn::Sampler({.top_p = 0}); }, "Sampler: expected top_p in (0, 1], got 0");
  expect_error([] { nn::Sampler({.top_p = NAN}); }, "Sampler: expected top_p in (0, 1], got nan");
  expect_error([] { nn::Sampler({.repetition_penalty = 0}); }, "Sampler: expected repetition_penalty > 0, got 0");
  nn::Sampler sampler({.repetition_penalty = 2});
  expect_error([&] { sampler.draw(ones({2, 3}), ones({2, 3})); }, "Sampler: expected seen of bool and [2, 3]");
  for (const Device device : test_devices()) {
    const double inf = INFINITY, nan = NAN;
    const Tensor logits = from_data({0.0, nan, 1.0, inf, -inf, -inf, -inf, 2.0}, {4, 2}, device);
    expect_close(sampler.draw(logits), Values{-1, -1, -1, 1}, 0, 0);
    expect_error([&] { sampler(logits); }, "Sampler: row 0 of the logits is not finite");
    Tensor rows = zeros({4, 8}, float32, device);
    copy_into(slice(slice(rows, 0, 0, 1), 1, 7, 8), full({1, 1}, nan, float32, device));
    copy_into(slice(slice(rows, 0, 1, 2), 1, 2, 3), full({1, 1}, inf, float32, device));
    copy_into(slice(rows, 0, 2, 3), full({1, 8}, -inf, float32, device));
    copy_into(slice(slice(rows, 0, 3, 4), 1, 0, 5), full({1, 5}, -inf, float32, device));
    expect_close(nn::Sampler({.temperature = 0}).draw(rows), Values{-1, -1, -1, 5}, 0, 0);
  }
}

}  // namespace
