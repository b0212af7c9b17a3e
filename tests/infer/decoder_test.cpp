#include <tests/nn/small_models.h>

#include <algorithm>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/nn/lora.h>
#include <mica/nn/models/starcoder.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/quantized/detail/few_rows.h>
#include <mica/ops/quantized/round_activations.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::small_models;

namespace decoder_test {

nn::StarcoderConfig starcoder_config() {
  return {.vocab = 13, .layers = 2, .heads = 4, .key_heads = 2, .width = 16, .hidden = 24, .window = 5};
}

// The logits of each step are those of the model for all tokens at once. The padding of the second text has no effect.
template <class Model>
void expect_logits_of_model(const Model& model, double tolerance) {
  const autograd::NoGrad no_grad;
  const Device device = model.parameters()[0].device();
  const Tensor tokens = randint(0, model.config.vocab, {2, 14}, int64, device);
  const Tensor first = model(slice(tokens, 0, 0, 1));
  const Tensor second = model(slice(slice(tokens, 0, 1, 2), 1, 3, 14));
  infer::DecoderOf<Model> decoder(model, {.batch = 2});
  for (int repeat = 0; repeat < 2; ++repeat) {  // prefill() begins again
    Tensor logits = decoder.prefill(slice(tokens, 1, 0, 9), {0, 3});
    for (std::int64_t at = 9;; ++at) {
      EXPECT_EQ(decoder.length(), at);
      expect_close(slice(logits, 0, 0, 1), select(first, 1, at - 1), tolerance, tolerance, fmt::format("at {}", at));
      expect_close(slice(logits, 0, 1, 2), select(second, 1, at - 4), tolerance, tolerance, fmt::format("at {}", at));
      if (at == 14) {
        break;
      }
      logits = decoder.step(select(tokens, 1, at));
    }
  }
  infer::DecoderOf<Model> of_one(model);
  const Tensor alone = of_one.prefill(slice(slice(tokens, 0, 1, 2), 1, 0, 9), {3});
  EXPECT_EQ(of_one.length(), 6);
  expect_close(alone, select(second, 1, 5), tolerance, tolerance);
  const Tensor next = select(slice(tokens, 0, 1, 2), 1, 9);
  expect_close(of_one.step(next), select(second, 1, 6), tolerance, tolerance);
}

TEST(Decoder, GivesTheLogitsOfTheModel) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      SCOPED_TRACE(fmt::format("{} {}", device, dtype));
      manual_seed(1);
      expect_logits_of_model(randomized(nn::GPT(gpt_config()), dtype, device), tolerance_of(dtype));
      expect_logits_of_model(randomized(nn::Llama(llama_config()), dtype, device), tolerance_of(dtype));
      nn::LlamaConfig config = wide_llama_config();
      config.rotated_layers = {true, false};
      expect_logits_of_model(randomized(nn::Llama(config), dtype, device), dtype == bfloat16 ? 0.5 : 1e-3);
      // Those that the kernels of a layer do not compute.
      for (const int kind : {0, 1, 2}) {
        config = wide_llama_config();
        config.norms_after = config.wide_qk_norm = kind == 0;
        config.residual_scale = kind == 1 ? 0.25 : 1;
        config.rotary.width = kind == 2 ? 24 : 0;
        expect_logits_of_model(randomized(nn::Llama(config), dtype, device), dtype == bfloat16 ? 0.5 : 1e-3);
      }
      expect_logits_of_model(randomized(nn::Starcoder(starcoder_config()), dtype, device), tolerance_of(dtype));
    }
  }
}

TEST(Decoder, RoundsActivationsOfQuantizedModels) {
  if (!kernels::has_integer_products()) {
    GTEST_SKIP() << "this CPU has no products of bytes";
  }
  const autograd::NoGrad no_grad;
  for (const int bits : {8, 4}) {
    manual_seed(21);
    nn::Llama llama = randomized(nn::Llama(llama_config()), float32, Device::cpu());
    nn::quantize(llama, bits);
    const Tensor tokens = randint(0, llama.config.vocab, {1, 12}, int64);
    const auto logits_of = [&](bool rounds) {
      infer::LlamaDecoder decoder(llama, {.round_activations = rounds});
      decoder.prefill(slice(tokens, 1, 0, 11));
      return decoder.step(select(tokens, 1, 11));
    };
    const Tensor exact = select(llama(tokens), 1, 11), rounded = logits_of(true);
    expect_close(logits_of(false), exact, 1e-4, 1e-4);
    const double difference = vector_norm(rounded - exact).item() / vector_norm(exact).item();
    EXPECT_GT(difference, 1e-4) << bits;
    EXPECT_LT(difference, 0.03) << bits;
    EXPECT_FALSE(RoundActivations::is_on());
  }
}

TEST(Decoder, ReplacesATokenByTheMostLikelyNextOne) {
  for (const Device device : test_devices()) {
    manual_seed(2);
    const nn::Llama llama = randomized(nn::Llama(llama_config()), float64, device);
    infer::LlamaDecoder decoder(llama), other(llama);
    const Tensor prompt = from_data<std::int64_t>({3, 1, 4}, {1, 3}, device);
    const Tensor token = argmax(decoder.prefill(prompt), 1);
    Tensor expected = argmax(other.prefill(prompt), 1);
    for (int i = 0; i < 8; ++i) {
      EXPECT_FALSE(decoder.replace(token));
      expected = argmax(other.step(expected), 1);
      EXPECT_EQ(token.item(), expected.item()) << i;
    }
  }
}

// A model of a user: what ComposedDecoder needs of it, and nothing else.
struct OwnModel {
  nn::KeyValueCache new_cache(std::int64_t batch, std::int64_t window) const { return gpt.new_cache(batch, window); }
  Tensor next_token_logits(const Tensor& tokens, nn::KeyValueCache* cache) const {
    return gpt.next_token_logits(tokens, cache);
  }

  struct {
    std::int64_t vocab = 13;
  } config{};
  nn::GPT gpt{gpt_config()};
};

TEST(Decoder, TakesAnyModelWithACache) {
  manual_seed(3);
  const OwnModel model;
  const infer::GenerateOptions options{.count = 30};  // past the context
  EXPECT_EQ(infer::generate(model, kPrompts, options), infer::generate(model.gpt, kPrompts, options));
}

TEST(Decoder, GeneratesAgainAndAgain) {
  manual_seed(4);
  const nn::Llama llama = randomized(nn::Llama(llama_config()), float64, Device::cpu());
  infer::LlamaDecoder decoder(llama, {.batch = 3, .window = 6});
  for (const std::uint64_t seed : {1, 2}) {
    const infer::GenerateOptions options{.count = 20, .sampling = {.seed = seed}, .window = 6};
    EXPECT_EQ(infer::generate(decoder, kPrompts, options), infer::generate(llama, kPrompts, options));
  }
}

// Adapters need the model's own forward, whose steps can be captured as well.
TEST(Decoder, CapturesAModelWithAdapters) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  for (const DType dtype : {float32, bfloat16}) {
    manual_seed(5);
    nn::Llama llama = randomized(nn::Llama(wide_llama_config()), dtype, Device::cuda());
    nn::add_lora(llama, {"*q_proj", "*down_proj"}, {.rank = 2});
    for (const nn::AdaptedLayer& adapted : nn::adapted_layers(llama)) {
      adapted.layer->lora_b.set_data(randn(adapted.layer->lora_b.shape()).to(Device::cuda(), dtype));
    }
    infer::GenerateOptions options{.count = 80, .sampling = {.temperature = 0.7, .seed = 2}, .cuda_graph = false};
    const std::vector<Tokens> expected = infer::generate(llama, kPrompts, options);
    options.cuda_graph = true;
    const cuda::LaunchRecord record;
    EXPECT_EQ(infer::generate(llama, kPrompts, options), expected);
    EXPECT_TRUE(record.has("cuda_graph"));
    EXPECT_FALSE(record.has("decode_linear_kernel"));
  }
}

TEST(Decoder, Errors) {
  const nn::Llama llama = randomized(nn::Llama(llama_config()), float32, Device::cpu());
  infer::LlamaDecoder decoder(llama, {.batch = 2});
  expect_error([&] { decoder.prefill(zeros({1, 3}, int64)); }, "Decoder: expected tokens of shape (2, T), T >= 1");
  expect_error([&] { decoder.prefill(zeros({2, 0}, int64)); }, "Decoder: expected tokens of shape (2, T), T >= 1");
  expect_error([&] { decoder.prefill(zeros({2, 3}, int64), {1}); }, "expected the padding of 2 sequences, got 1");
  expect_error([&] { decoder.step(zeros({3}, int64)); },
               "Decoder: expected one token for each of 2 texts, got shape [3]");
  expect_error(
      [&] {
        infer::LlamaDecoder(llama).prefill(zeros({1, 3}, int64), {3});
      },
      "Decoder: expected padding of 0 to 2, got 3");
  expect_error([&] { infer::generate(decoder, {{1}}); }, "generate: expected 2 prompts, the decoder's texts, got 1");
  expect_error(
      [&] {
        infer::generate(decoder, {{1}, {2}}, {.window = 5});
      },
      "generate: expected the decoder's window, 0, got 5");
}

}  // namespace decoder_test
