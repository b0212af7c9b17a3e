#include <tests/launches.h>
#include <tests/nn/small_models.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::small_models;

namespace {

TEST(Generate, AWindowOfTheWholeTextChangesNothing) {
  manual_seed(15);
  nn::Llama llama = randomized(nn::Llama(llama_config()), float64, Device::cpu());
  const infer::SamplingOptions greedy{.temperature = 0};
  const std::vector<Tokens> expected = infer::generate(llama, kPrompts, {.count = 40, .sampling = greedy});
  EXPECT_EQ(infer::generate(llama, kPrompts, {.count = 40, .sampling = greedy, .window = 48}), expected);
  EXPECT_NE(infer::generate(llama, kPrompts, {.count = 40, .sampling = greedy, .window = 3}), expected);
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
    const infer::GenerateOptions greedy{.count = 20, .sampling = {.temperature = 0}};
    EXPECT_EQ(infer::generate(llama, kPrompts, greedy), computed_again(llama, kPrompts, 20, 1000));
    EXPECT_EQ(infer::generate(gpt, kPrompts, greedy), computed_again(gpt, kPrompts, 20, 20));  // past the context
    const Tokens expected = infer::generate(llama, {{7}}, greedy)[0];
    EXPECT_EQ(infer::generate(llama, {{7}, {7}}, greedy), (std::vector<Tokens>{expected, expected}));
    EXPECT_EQ(infer::generate(gpt, {}, greedy), std::vector<Tokens>{});
  }
}

TEST(Generate, SameTokensOnBothDevices) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  manual_seed(5);
  nn::Llama llama = randomized(nn::Llama(llama_config()), float64, Device::cpu());
  for (const infer::SamplingOptions& sampling :
       {infer::SamplingOptions{.seed = 1}, infer::SamplingOptions{.temperature = 0.7, .top_k = 5, .seed = 2},
        infer::SamplingOptions{.top_p = 0.8, .repetition_penalty = 1.2, .seed = 3}}) {
    llama.to(Device::cpu());
    const std::vector<Tokens> expected = infer::generate(llama, kPrompts, {.count = 40, .sampling = sampling});
    llama.to(Device::cuda());
    EXPECT_EQ(infer::generate(llama, kPrompts, {.count = 40, .sampling = sampling}), expected);
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
    for (const infer::SamplingOptions& sampling :
         {infer::SamplingOptions{.temperature = 0}, infer::SamplingOptions{.temperature = 0.7, .seed = 2},
          infer::SamplingOptions{.top_k = 9, .top_p = 0.8, .repetition_penalty = 1.2, .seed = 3}}) {
      infer::GenerateOptions options{.count = 100, .sampling = sampling, .cuda_graph = false};
      const std::vector<Tokens> expected = infer::generate(llama, kPrompts, options);
      const std::vector<Tokens> expected_of_gpt = infer::generate(gpt, kPrompts, options);  // past the context
      options.cuda_graph = true;
      cuda::LaunchRecord record;
      EXPECT_EQ(infer::generate(llama, kPrompts, options), expected);
      EXPECT_TRUE(record.has("cuda_graph"));
      record.clear();
      EXPECT_EQ(infer::generate(gpt, kPrompts, options), expected_of_gpt);
      EXPECT_TRUE(record.has("cuda_graph"));
    }
    if (dtype == float32) {
      const infer::GenerateOptions options{.count = 60, .sampling = {.temperature = 0.7, .top_k = 20, .seed = 5}};
      const std::vector<Tokens> on_device = infer::generate(llama, kPrompts, options);
      llama.to(Device::cpu());
      EXPECT_EQ(infer::generate(llama, kPrompts, options), on_device);
      infer::GenerateOptions windowed = options;
      windowed.window = 9;
      const std::vector<Tokens> on_host = infer::generate(llama, kPrompts, windowed);
      llama.to(Device::cuda());
      EXPECT_EQ(infer::generate(llama, kPrompts, windowed), on_host);
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
    nn::quantize(llama, {.bits = bits}, bits);
    nn::quantize(gpt, {.bits = bits}, bits);
    const infer::GenerateOptions options{.count = 30, .sampling = {.temperature = 0.7, .top_k = 5, .seed = 2}};
    const std::vector<Tokens> expected = infer::generate(llama, kPrompts, options);
    const std::vector<Tokens> expected_of_gpt = infer::generate(gpt, kPrompts, options);
    llama.to(Device::cuda());
    gpt.to(Device::cuda());
    EXPECT_EQ(infer::generate(llama, kPrompts, options), expected);
    EXPECT_EQ(infer::generate(gpt, kPrompts, options), expected_of_gpt);
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
      nn::quantize(llama, {.bits = bits}, bits);
      infer::GenerateOptions options{.count = 60, .sampling = {.temperature = 0.7, .seed = 2}, .cuda_graph = false};
      const std::vector<Tokens> expected = infer::generate(llama, kPrompts, options);
      options.cuda_graph = true;
      const cuda::LaunchRecord record;
      EXPECT_EQ(infer::generate(llama, kPrompts, options), expected);
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
      const infer::GenerateOptions options{.count = 30, .sampling = {.temperature = 0.7, .top_k = 5, .seed = 2}};
      const std::vector<Tokens> before = infer::generate(rounded, kPrompts, options);
      nn::quantize(llama, {.bits = bits}, bits);
      const std::vector<nn::AdaptedLayer> layers = nn::linear_layers(llama), same = nn::linear_layers(rounded);
      ASSERT_EQ(layers.size(), 15u);
      for (std::size_t i = 0; i < layers.size(); ++i) {
        same[i].layer->weight.set_data(contiguous(transpose(dequantize(layers[i].layer->quantized, float64), 0, 1)));
      }
      const std::vector<Tokens> expected = infer::generate(rounded, kPrompts, options);
      EXPECT_NE(expected, before);
      EXPECT_EQ(infer::generate(llama, kPrompts, options), expected);
    }
  }
}

TEST(Generate, OneTextInOneKernel) {
  if (!gpu_has_wgmma()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  manual_seed(14);
  nn::LlamaConfig config = wide_llama_config();
  config.head_width = 64;
  nn::Llama llama = randomized(nn::Llama(config), bfloat16, Device::cuda());
  const std::vector<Tokens> prompt{{3, 1, 4, 1, 5}};
  for (const std::int64_t window : {0, 20}) {
    infer::GenerateOptions options{.count = 100, .sampling = {.temperature = 0.7, .seed = 2}, .window = window};
    options.cuda_graph = false;
    cuda::LaunchRecord record;
    const std::vector<Tokens> expected = infer::generate(llama, prompt, options);
    EXPECT_TRUE(record.has("decoder_step_kernel"));
    options.cuda_graph = true;
    EXPECT_EQ(infer::generate(llama, prompt, options), expected);
    EXPECT_TRUE(record.has("cuda_graph"));
  }
}

TEST(Generate, LargestLogitInOneKernel) {
  if (!gpu_has_wgmma()) {
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
        nn::quantize(llama, {.bits = bits}, bits);
      }
      for (const std::int64_t window : {0, 20}) {
        // Computed from the same kernel's logits.
        infer::LlamaDecoder decoder(llama, {.window = window});
        Tensor token = argmax(decoder.prefill(from_data(prompt[0], {1, 5}, Device::cuda())), 1);
        Tokens expected;
        for (std::int64_t i = 0; i < kCount; ++i) {
          expected.push_back(static_cast<std::int64_t>(token.item()));
          token = argmax(decoder.step(token), 1);
        }
        infer::GenerateOptions options{
            .count = kCount, .sampling = {.temperature = 0}, .window = window, .cuda_graph = false};
        cuda::LaunchRecord record;
        EXPECT_EQ(infer::generate(llama, prompt, options)[0], expected);
        const std::vector<std::string> names = record.names();
        EXPECT_EQ(std::count(names.begin(), names.end(), "decoder_step_kernel"), kCount - 1);
        const auto draws = [](const std::string& name) { return name.starts_with("sample_"); };
        EXPECT_LE(std::count_if(names.begin(), names.end(), draws), 1);  // after the prompt
        EXPECT_EQ(names.back(), "decoder_step_kernel");
        options.cuda_graph = true;
        EXPECT_EQ(infer::generate(llama, prompt, options)[0], expected);
        EXPECT_TRUE(record.has("cuda_graph"));
        options.sampling = {.top_k = 1};
        EXPECT_EQ(infer::generate(llama, prompt, options)[0], expected);
      }
    }
  }
}

// If logits are not finite, the next step is launched before the host knows.
TEST(Generate, LogitsThatAreNotFiniteInOneKernel) {
  if (!gpu_has_wgmma()) {
    GTEST_SKIP() << "there is no GPU of compute capability 9.0";
  }
  manual_seed(16);
  nn::LlamaConfig config = wide_llama_config();
  config.head_width = 64;
  config.tied_head = false;
  nn::Llama llama = randomized(nn::Llama(config), bfloat16, Device::cuda());
  const infer::GenerateOptions options{.count = 40, .sampling = {.temperature = 0}};
  const Tokens expected = infer::generate(llama, {{3, 1, 4}}, options)[0];
  // A token with an embedding that is not finite: the text is unchanged until that token is drawn.
  const auto bad =
      std::find_if(expected.begin(), expected.end(), [](std::int64_t t) { return t != 3 && t != 1 && t != 4; });
  ASSERT_LT(bad - expected.begin(), 39);
  const auto first = bad - expected.begin();
  fill_data(slice(llama.model.embed_tokens.weight.detach(), 0, *bad, *bad + 1), NAN);
  expect_error(
      [&] {
        infer::generate(llama, {{3, 1, 4}}, options);
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
  const infer::GenerateOptions options{.count = 60, .sampling = {.temperature = 0.7, .top_k = 20, .seed = 5}};
  cuda::LaunchRecord record;
  const std::vector<Tokens> on_device = infer::generate(llama, kPrompts, options);
  EXPECT_FALSE(record.has("cuda_graph"));
  llama.to(Device::cpu());
  EXPECT_EQ(infer::generate(llama, kPrompts, options), on_device);
}

// Texts end with a stop token, or when the callback returns false. On CUDA the next step is already running then.
void expect_stops(nn::Llama& llama, const std::vector<Tokens>& prompts, const infer::SamplingOptions& sampling) {
  const std::vector<Tokens> all = infer::generate(llama, prompts, {.count = 30, .sampling = sampling});
  const std::size_t last = prompts.size() - 1;
  const Tokens stops{all[0][7], all[last][3]};
  for (const std::size_t most : {std::size_t{30}, std::size_t{2}}) {  // tokens of the last text
    std::vector<Tokens> seen(prompts.size());
    const std::vector<Tokens> stopped = infer::generate(llama, prompts,
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
    for (const infer::SamplingOptions& sampling :
         {infer::SamplingOptions{.seed = 9}, infer::SamplingOptions{.temperature = 0, .repetition_penalty = 3}}) {
      expect_stops(wide, kPrompts, sampling);
      expect_stops(wide, {kPrompts[0]}, sampling);
    }
    expect_stops(wide, {kPrompts[0]}, {.temperature = 0});  // one kernel for each step
  }
}

TEST(Generate, KeepsTheModeAndRecordsNothing) {
  manual_seed(7);
  nn::GPT gpt(gpt_config());
  infer::ComposedDecoder<nn::GPT> decoder(gpt);
  EXPECT_FALSE(decoder.prefill(zeros({1, 1}, int64)).requires_grad());
  EXPECT_FALSE(decoder.step(zeros({1}, int64)).requires_grad());
  EXPECT_TRUE(gpt.is_training());
}

TEST(Generate, ReproducibleAndWithinTheContext) {
  manual_seed(5);
  const nn::GPT gpt{{.vocab = 7, .context = 6, .layers = 1, .heads = 1, .width = 4, .dropout = 0.5}};
  const auto generated = [&](std::uint64_t seed, std::int64_t count = 10) {
    return infer::generate(gpt, {{1, 2, 3, 4}, {5, 6, 0, 1}}, {.count = count, .sampling = {.seed = seed}});
  };
  const std::vector<Tokens> tokens = generated(1);
  ASSERT_EQ(tokens.size(), 2u);
  EXPECT_EQ(tokens[0].size(), 10u);
  EXPECT_EQ(generated(1), tokens);
  EXPECT_NE(generated(2), tokens);
  EXPECT_EQ(generated(1, 0), std::vector<Tokens>(2));
  EXPECT_TRUE(gpt.drop.is_training());
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
  const infer::GenerateOptions greedy{.count = 8, .sampling = {.temperature = 0}};
  const std::vector<Tokens> expected = infer::generate(gpt, kPrompts, greedy);
  for (const bool training : {true, false}) {
    gpt.train(training);
    gpt.h[1].train(!training);
    const std::vector<bool> modes = modes_of(gpt);
    EXPECT_NE(std::count(modes.begin(), modes.end(), true), 0);
    EXPECT_NE(std::count(modes.begin(), modes.end(), false), 0);
    EXPECT_EQ(infer::generate(gpt, kPrompts, greedy), expected);  // without dropout
    EXPECT_EQ(modes_of(gpt), modes);

    infer::GenerateOptions throws = greedy;
    throws.on_token = [&](std::size_t, std::int64_t) -> bool {
      const std::vector<bool> here = modes_of(gpt);
      EXPECT_EQ(std::count(here.begin(), here.end(), true), 0);
      std::vector<bool> elsewhere;  // where the model may be training
      std::thread([&] { elsewhere = modes_of(gpt); }).join();
      EXPECT_EQ(elsewhere, modes);
      fail("the callback failed");
    };
    expect_error([&] { infer::generate(gpt, kPrompts, throws); }, "the callback failed");
    EXPECT_EQ(modes_of(gpt), modes);
    EXPECT_TRUE(autograd::grad_enabled());
  }
}

TEST(Generate, Errors) {
  manual_seed(8);
  nn::Llama llama = randomized(nn::Llama(llama_config()), float32, Device::cpu());
  expect_error(
      [&] {
        infer::generate(llama, {{1}, {}});
      },
      "expected at least one token in each prompt, got none in number 1");
  expect_error([&] { infer::generate(llama, {{1, 13}}); }, "expected tokens in [0, 13), got 13 in prompt 0");
  expect_error([&] { infer::generate(llama, {{1}}, {.count = -1}); }, "expected from 0 to 16777216 new tokens, got -1");
  expect_error([&] { infer::generate(llama, {{1}}, {.count = 1 << 25}); }, "new tokens, got 33554432");
  expect_error([&] { infer::generate(llama, {{1}}, {.sampling = {.top_p = 0}}); }, "expected top_p in (0, 1], got 0");
  llama.lm_head.weight.set_data(full(llama.lm_head.weight.shape(), NAN));
  expect_error([&] { infer::generate(llama, {{1, 2}}); }, "the logits after 2 tokens of text 0 are not finite");
}

}  // namespace
