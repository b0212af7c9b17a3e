#include <tests/nn/support.h>
#include <unistd.h>

#include <filesystem>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/io/safetensors.h>
#include <mica/nn/linear.h>
#include <mica/nn/lora.h>
#include <mica/nn/models/gpt.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Names = std::vector<std::string>;

TEST(QuantizedLinear, FromLinearIsTheLinearOfTheRoundedWeight) {
  manual_seed(1);
  const nn::Linear linear{70, 9};
  const auto quantized = nn::QuantizedLinear::from(linear, {.bits = 8, .group_size = 32});
  const Tensor x = randn({2, 3, 70});
  const Tensor y = quantized(x);
  EXPECT_EQ(y.shape(), (Shape{2, 3, 9}));
  expect_close(y, matmul(x, dequantize(quantized.quantized)) + linear.bias, 1e-5, 1e-5);
  expect_close(y, linear(x), 0, 0.02, "rounding of 8 bits");
  // It is a copy.
  EXPECT_FALSE(quantized.bias.is_same(linear.bias));
  linear.bias.detach().data<float>()[0] += 1;
  expect_close(quantized(x), y, 0, 0);
  EXPECT_FALSE(nn::QuantizedLinear::from(nn::Linear{70, 9, {.bias = false}}).bias.defined());
}

TEST(QuantizedLinear, NamesAndState) {
  manual_seed(2);
  const auto quantized = nn::QuantizedLinear::from(nn::Linear{40, 6});
  EXPECT_EQ(names_of(quantized.named_parameters()), (Names{"bias"}));
  EXPECT_EQ(names_of(quantized.named_buffers()), (Names{"packed", "scale", "zero"}));

  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("mica_quantized_linear_{}.safetensors", getpid());
  io::save(path, quantized.state_dict());
  nn::QuantizedLinear loaded{40, 6};
  const Tensor x = randn({5, 40});
  expect_close(loaded(x), std::vector<double>(30, 0), 0, 0);
  loaded.load_state_dict(io::load(path));
  std::filesystem::remove(path);
  expect_close(loaded(x), quantized(x), 0, 0);

  nn::QuantizedLinear other{40, 6, {.quantize = {.bits = 8}}};
  expect_error([&] { other.load_state_dict(quantized.state_dict()); }, "packed (expected [10, 6], got [5, 6])");
}

TEST(QuantizedLinear, Gradients) {
  manual_seed(3);
  nn::QuantizedLinear quantized = nn::QuantizedLinear::from(nn::Linear{35, 4}, {.bits = 4, .group_size = 32});
  check_gradients(quantized, randn({2, 3, 35}));
  compare_devices(quantized, randn({2, 3, 35}));
}

TEST(QuantizedLinear, ConvertsItsFactorsAndNotItsIntegers) {
  manual_seed(4);
  nn::QuantizedLinear quantized = nn::QuantizedLinear::from(nn::Linear{35, 4});
  quantized.to(bfloat16);
  EXPECT_EQ(quantized.quantized.packed.dtype(), int32);
  EXPECT_EQ(quantized.quantized.scale.dtype(), bfloat16);
  EXPECT_EQ(quantized(randn({2, 35}, bfloat16)).dtype(), bfloat16);
}

TEST(Quantize, AModelComputesWithTheRoundedWeights) {
  manual_seed(5);
  nn::GPT gpt({.vocab = 40, .context = 8, .layers = 1, .heads = 2, .width = 32});
  gpt.eval();
  const autograd::NoGrad no_grad;
  const Tensor tokens = randint(0, 40, {2, 8});
  const Tensor exact = gpt(tokens);
  // The same model with weights rounded in floating point.
  nn::GPT rounded({.vocab = 40, .context = 8, .layers = 1, .heads = 2, .width = 32});
  rounded.load_state_dict(gpt.state_dict());
  rounded.eval();
  const QuantizeOptions options{.bits = 8, .group_size = 32};
  for (const nn::AdaptedLayer& layer : nn::linear_layers(rounded)) {
    if (layer.name != "lm_head") {
      const QuantizedWeight q = quantize(transpose(layer.layer->weight.detach(), 0, 1), options);
      copy_into(layer.layer->weight.detach(), transpose(dequantize(q), 0, 1));
    }
  }
  EXPECT_EQ(nn::quantize(gpt, options),
            (Names{"h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "lm_head"}));
  EXPECT_TRUE(gpt.wte.weight.defined());
  expect_close(gpt(tokens), exact, 0, 0.02);
  // The head of `rounded` is exact.
  expect_close(gpt(tokens), rounded(tokens), 0, 0.01);
  expect_error([&] { nn::quantize(gpt); }, "quantize: h.0.attn.c_attn is quantized already");
  expect_error([&] { nn::quantize(rounded, {.bits = 3}); }, "expected 8, 4, 2 or 1 bits, got 3");
  expect_error([&] { nn::quantize(gpt, 4); }, "quantize: h.0.attn.c_attn is quantized already");
  expect_error([&] { nn::quantize(rounded, 3); }, "expected 8, 4, 2 or 1 bits, got 3");
  EXPECT_FALSE(rounded.lm_head.is_quantized());
  EXPECT_EQ(nn::quantize(rounded, 4).size(), 5u);  // on the CPU, in two levels
  for (const nn::AdaptedLayer& layer : nn::linear_layers(rounded)) {
    const QuantizedWeight& q = layer.layer->quantized;
    EXPECT_EQ(q.bits, layer.name == "lm_head" ? 8 : 4);
    EXPECT_EQ(q.group_size, layer.name == "lm_head" ? 128 : q.columns() > q.rows ? 64 : 32);
    EXPECT_EQ(q.scale.dtype(), layer.name == "lm_head" ? float16 : uint8);
  }
  expect_close(rounded(tokens), exact, 0, 0.2);
}

TEST(Quantize, AnAdapterTrainsOnTopOfAQuantizedWeight) {
  manual_seed(6);
  nn::Linear layer{33, 5};
  const Tensor x = randn({4, 33});
  layer.quantize({.bits = 4, .group_size = 32});
  EXPECT_EQ(names_of(layer.named_parameters()), (Names{"bias"}));
  EXPECT_EQ(names_of(layer.named_buffers()), (Names{"packed", "scale", "zero"}));
  const Tensor before = layer(x, Activation::relu);
  expect_close(before, relu(matmul(x, dequantize(layer.quantized)) + layer.bias), 1e-5, 1e-5);
  layer.add_lora({.rank = 2});
  expect_close(layer(x, Activation::relu), before, 0, 0);
  layer.lora_b.set_data(randn(layer.lora_b.shape()));
  expect_close(layer(x),
               matmul(x, dequantize(layer.quantized)) + layer.bias + linear(linear(x, layer.lora_a), layer.lora_b) * 8,
               1e-4, 1e-4);
  sum(layer(x)).backward();
  EXPECT_TRUE(layer.lora_a.grad().defined());
  expect_error([&] { layer.merge_lora(); }, "cannot be merged into a quantized weight");
  expect_error([&] { layer.quantize({}); }, "the weight is quantized already");
}

TEST(QuantizedLinear, TakesAdapters) {
  struct Model : nn::Module {
    nn::QuantizedLinear fc1 = child("fc1", nn::QuantizedLinear::from(nn::Linear{40, 6}, {.bits = 8}));
    nn::Linear fc2 = child("fc2", nn::Linear{6, 3});
    Tensor operator()(const Tensor& x) const { return fc2(fc1(x, Activation::relu)); }
  };
  manual_seed(7);
  Model model;
  const Tensor x = randn({4, 40});
  const Tensor before = model(x);
  expect_close(before, linear(relu(model.fc1(x)), model.fc2.weight, model.fc2.bias), 0, 0);
  EXPECT_EQ(nn::add_lora(model, {"*"}, {.rank = 2}), (Names{"fc1", "fc2"}));
  expect_close(model(x), before, 0, 0);
  sum(model(x)).backward();
  EXPECT_TRUE(model.fc1.lora_b.grad().defined());
  EXPECT_EQ(nn::trainable_parameters(model).size(), 4u);
  expect_error([&] { nn::merge_lora(model); }, "the weight of fc1 is quantized");

  // A weight without scales.
  nn::QuantizedLinear plain{
      QuantizedWeight{.packed = ones({5, 3}, int32), .rows = 40, .mode = QuantizationMode::packed}};
  plain.add_lora({.rank = 2});
  EXPECT_EQ(plain.lora_a.dtype(), float32);
  EXPECT_EQ(plain(x).shape(), (Shape{4, 3}));
}

TEST(QuantizedLinear, Errors) {
  expect_error([] { nn::QuantizedLinear(0, 4); }, "QuantizedLinear: expected in >= 1 and out >= 1, got 0 and 4");
  expect_error([] { nn::QuantizedLinear(QuantizedWeight{}); }, "Linear: expected packed to be");
  expect_error(
      [] {
        nn::QuantizedLinear(quantize(ones({8, 3})), ones({2}));
      },
      "Linear: expected a bias of shape [3], got [2]");
  expect_error([] { (nn::QuantizedLinear{8, 3})(ones({2, 7})); }, "quantized_matmul: expected x of shape (…, 8)");
}

}  // namespace
