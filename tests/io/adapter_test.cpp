#include <fmt/format.h>
#include <tests/files.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <tests/support.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/rng.h>
#include <mica/io/adapter.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>
#include <mica/optim/adamw.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

namespace fs = std::filesystem;

const fs::path kFixtures = folder_from("MICA_PRETRAINED_FIXTURES", MICA_PRETRAINED_FIXTURES);
const fs::path kAdapters = kFixtures.parent_path() / "adapters";

class Adapter : public testing::Test {
 protected:
  const TemporaryFolder own_;
  const fs::path folder_ = own_.path() / "adapter";
};

template <class Model>
Model adapted(const std::string& name, const std::string& stage, Device device, DType dtype) {
  Model model = io::load_pretrained<Model>(kFixtures / name, {.device = device, .dtype = dtype});
  io::load_adapter(model, kAdapters / name / stage);
  return model;
}

double number_of(const io::JsonValue& value) { return *value.as<double>(); }

// The loss before each step.
template <class Model>
std::vector<double> train(const Model& model, const Tensor& tokens, const Tensor& targets,
                          const optim::AdamWOptions& options, int steps = 100) {
  optim::AdamW optimizer(nn::trainable_parameters(model), options);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = model.loss(tokens, targets);
    losses.push_back(loss.item());
    loss.backward();
    optimizer.step();
  }
  return losses;
}

// Expects PEFT's losses of 100 steps of AdamW in float64, from the same initial values. (transformers computes norms in
// float32.)
template <class Model>
void expect_losses_of_peft(const std::string& name, const fs::path& folder, Device device, DType dtype) {
  SCOPED_TRACE(fmt::format("{} in {} on {}", name, dtype, device));
  const io::JsonValue about = io::read_json(kAdapters / name / "losses.json", 1 << 20);
  const StateDict data = io::load(kFixtures / name / "expected.safetensors");
  const Tensor tokens = data.at("tokens").to(device), targets = data.at("targets").to(device);
  const double trained_loss = number_of(*about.find("trained_loss"));

  Model model = adapted<Model>(name, "start", device, dtype);
  const StateDict before = model.state_dict();
  const Tensor embedding = model.parameters()[0].detach() + 0;
  const std::vector<double> losses =
      train(model, tokens, targets,
            {.lr = number_of(*about.find("learning_rate")), .weight_decay = number_of(*about.find("weight_decay"))});
  const auto& expected = *about.find("losses")->as<io::JsonValue::Array>();
  ASSERT_EQ(losses.size(), expected.size());
  for (std::size_t step = 0; step < losses.size(); ++step) {
    ASSERT_NEAR(losses[step], number_of(expected[step]), dtype == float64 ? 1e-4 : 0.01) << "step " << step;
  }
  expect_close(model.parameters()[0], embedding, 0, 0);  // frozen

  const autograd::NoGrad no_grad;
  EXPECT_NEAR(model.loss(tokens, targets).item(), trained_loss, dtype == float64 ? 1e-4 : 0.01);
  const Tensor logits = model(tokens);
  // Saved and loaded again: the same bits. Merged: the same function.
  io::save_adapter(model, folder);
  if (const char* kept = std::getenv("MICA_SAVED_ADAPTERS"); kept != nullptr && dtype == float32) {
    io::save_adapter(model, fs::path(kept) / name, name);  // for check_adapters.py
  }
  Model again = io::load_pretrained<Model>(kFixtures / name, {.device = device, .dtype = dtype});
  io::load_adapter(again, folder);
  expect_close(again(tokens), logits, 0, 0);
  nn::merge_lora(again);
  EXPECT_TRUE(nn::adapted_layers(again).empty());
  expect_close(again(tokens), logits, 1e-4, 1e-4);
  EXPECT_EQ(again.state_dict().size(), before.size() - 2 * nn::adapted_layers(model).size());
  // Adapters trained by PEFT.
  Model trained = adapted<Model>(name, "trained", device, dtype);
  EXPECT_NEAR(trained.loss(tokens, targets).item(), trained_loss, 1e-4);
}

// Writes each step's loss at several rates for compare_losses.py: {"float64 0.01": [4.0, …], …}.
template <class Model>
void save_losses(const std::string& name, const fs::path& file) {
  const StateDict data = io::load(kFixtures / name / "expected.safetensors");
  std::string json;
  for (const DType dtype : {float64, float32}) {
    for (const double rate : {1e-2, 5e-3, 2e-3}) {
      const Model model = adapted<Model>(name, "start", Device::cpu(), dtype);
      const std::vector<double> losses =
          train(model, data.at("tokens"), data.at("targets"), {.lr = rate, .weight_decay = 0.01});
      json += fmt::format("{}\"{} {}\": [{:.17g}]", json.empty() ? "" : ",\n ", dtype, rate, fmt::join(losses, ", "));
    }
  }
  std::ofstream(file) << "{" << json << "}\n";
}

TEST_F(Adapter, TrainsAsPeft) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      expect_losses_of_peft<nn::GPT>("gpt2", folder_, device, dtype);
      expect_losses_of_peft<nn::Llama>("llama3", folder_, device, dtype);
    }
  }
  if (const char* kept = std::getenv("MICA_SAVED_ADAPTERS")) {
    save_losses<nn::GPT>("gpt2", fs::path(kept) / "gpt2" / "losses.json");
    save_losses<nn::Llama>("llama3", fs::path(kept) / "llama3" / "losses.json");
  }
}

// Ranks and alphas by layer, DoRA, trained biases and modules: see FEATURES in make_adapters.py.
template <class Model>
void expect_feature(const std::string& name, Device device, const fs::path& folder) {
  SCOPED_TRACE(name);
  const io::JsonValue about = io::read_json(kAdapters / name / "losses.json", 1 << 20);
  const std::string base = *about.find("base")->as<std::string>();
  const StateDict data = io::load(kFixtures / base / "expected.safetensors");
  const Tensor tokens = data.at("tokens").to(device), targets = data.at("targets").to(device);
  const auto loaded = [&](DType dtype = float64) {
    return io::load_pretrained<Model>(kFixtures / base, {.device = device, .dtype = dtype});
  };
  Model model = loaded();
  io::load_adapter(model, kAdapters / name);
  const auto& expected = *about.find("losses")->as<io::JsonValue::Array>();
  const std::vector<double> losses =
      train(model, tokens, targets, {.lr = number_of(*about.find("learning_rate")), .weight_decay = 0.01},
            static_cast<int>(expected.size()));
  for (std::size_t step = 0; step < losses.size(); ++step) {
    ASSERT_NEAR(losses[step], number_of(expected[step]), 1e-4) << "step " << step;
  }
  const autograd::NoGrad no_grad;
  EXPECT_NEAR(model.loss(tokens, targets).item(), number_of(*about.find("trained_loss")), 1e-4);
  const Tensor logits = model(tokens);
  io::save_adapter(model, folder, base);
  if (const char* kept = std::getenv("MICA_SAVED_ADAPTERS"); kept != nullptr && device.is_cpu()) {
    io::save_adapter(model, fs::path(kept) / name, base);
  }
  Model again = loaded();
  io::load_adapter(again, folder);
  expect_close(again(tokens), logits, 0, 0);
  EXPECT_EQ(nn::trainable_parameters(again).size(), nn::trainable_parameters(model).size());
  nn::merge_lora(again);
  expect_close(again(tokens), logits, 1e-10, 1e-10);
}

TEST_F(Adapter, FeaturesOfPeft) {
  for (const Device device : test_devices()) {
    expect_feature<nn::Llama>("patterns", device, folder_);
    expect_feature<nn::Llama>("dora", device, folder_);
    expect_feature<nn::GPT>("biases", device, folder_);
  }
}

// PEFT's adapters of qkv_proj and gate_up_proj.
TEST_F(Adapter, OfFusedLayers) {
  const io::JsonValue about = io::read_json(kAdapters / "phi" / "losses.json", 1 << 20);
  const double expected = number_of((*about.find("losses")->as<io::JsonValue::Array>())[0]);
  const StateDict data = io::load(kFixtures / "phi3" / "expected.safetensors");
  const auto loss_of = [&](const nn::Llama& model) { return model.loss(data.at("tokens"), data.at("targets")).item(); };
  nn::Llama model = io::load_pretrained<nn::Llama>(kFixtures / "phi3", {.dtype = float64});
  const double before = loss_of(model);
  io::load_adapter(model, kAdapters / "phi");
  EXPECT_EQ(nn::adapted_layers(model).size(), 2 * 6U);
  EXPECT_NEAR(loss_of(model), expected, 1e-7);
  EXPECT_GT(std::abs(before - expected), 1e-3);
  io::save_adapter(model, folder_);  // as adapters of the parts
  nn::Llama again = io::load_pretrained<nn::Llama>(kFixtures / "phi3", {.dtype = float64});
  io::load_adapter(again, folder_);
  EXPECT_EQ(loss_of(again), loss_of(model));
  StateDict state = io::load(kAdapters / "phi" / "adapter_model.safetensors");
  const std::string up = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight";
  state.at(up) = slice(state.at(up), 0, 0, 30);
  io::save(folder_ / "adapter_model.safetensors", state);
  nn::Llama fresh = io::load_pretrained<nn::Llama>(kFixtures / "phi3");
  expect_error([&] { io::load_adapter(fresh, folder_); }, "expected \"" + up + "\" to have 32 rows, got shape [30, 3]");
}

TEST_F(Adapter, DoraStartsAtTheModel) {
  for (const Device device : test_devices()) {
    nn::Llama model = io::load_pretrained<nn::Llama>(kFixtures / "llama3", {.device = device});
    const Tensor tokens = io::load(kFixtures / "llama3" / "expected.safetensors").at("tokens").to(device);
    const Tensor before = model(tokens).detach();
    nn::add_lora(model, {"*q_proj", "*down_proj"}, {.dora = true});
    expect_close(model(tokens), before, 1e-5, 1e-5);
    nn::Llama quantized = io::load_pretrained<nn::Llama>(kFixtures / "llama3", {.device = device});
    nn::quantize(quantized, {.bits = 8});
    const Tensor rounded = quantized(tokens).detach();
    nn::add_lora(quantized, {"*q_proj"}, {.dropout = 0.5, .dora = true});
    quantized.eval();
    expect_close(quantized(tokens), rounded, 1e-5, 1e-5);
  }
}

// What PEFT has no configuration for, and trained tensors that a model cannot have.
TEST_F(Adapter, TrainedParameters) {
  const auto loaded = [&](const std::string& name) { return io::load_pretrained<nn::Llama>(kFixtures / name); };
  nn::Llama model = loaded("qwen2");
  nn::add_lora(model, {"*q_proj"});
  model.model.layers[0].self_attn.k_proj.bias.requires_grad_();
  expect_error([&] { io::save_adapter(model, folder_); },
               "PEFT trains the biases of the adapted layers, or all: expected one of these, but 1 biases are trained");
  model.model.layers[0].self_attn.k_proj.bias.requires_grad_(false);
  model.model.layers[0].self_attn.q_proj.weight.requires_grad_();
  expect_error([&] { io::save_adapter(model, folder_); }, "q_proj has an adapter, but its weight is trained, too");
  model.model.layers[0].self_attn.q_proj.weight.requires_grad_(false);
  // A tied head is written beside the embedding, and read if both are the same.
  model.model.embed_tokens.weight.requires_grad_();
  model.model.embed_tokens.weight.data<float>()[0] = 3;
  io::save_adapter(model, folder_);
  nn::Llama again = loaded("qwen2");
  io::load_adapter(again, folder_);
  EXPECT_EQ(again.lm_head.weight.data<float>()[0], 3);
  EXPECT_TRUE(again.lm_head.weight.requires_grad());
  const fs::path file = folder_ / "adapter_model.safetensors";
  const StateDict state = io::load(file);
  const auto refuse = [&](auto change, const std::string& message) {
    StateDict other = state;
    change(other);
    io::save(file, other);
    nn::Llama fresh = loaded("qwen2");
    expect_error([&] { io::load_adapter(fresh, folder_); }, message);
    EXPECT_TRUE(nn::adapted_layers(fresh).empty());
  };
  const std::string head = "base_model.model.lm_head.weight", embedding = "base_model.model.model.embed_tokens.weight";
  refuse([&](StateDict& s) { s.erase(head); },
         "model.embed_tokens.weight: it is tied to lm_head.weight, which has another value in the adapter");
  refuse([&](StateDict& s) { s[head] = s.at(head) * 2; }, "it is tied to");
  refuse([&](StateDict& s) { s[head] = ones({3}), s[embedding] = ones({3}); }, "expected a floating tensor of shape");
  refuse([&](StateDict& s) { s["base_model.model.model.norm.weight"] = ones({16}) * 2; },
         "model.norm.weight: it was trained on another tensor, of which it has a copy, or modules_to_save lacks it");
  refuse([&](StateDict& s) { s["base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"] = ones({16}); },
         "model.layers.0.self_attn.q_proj: it was trained on another bias, of which it has a copy");
  refuse(
      [&](StateDict& s) { s["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = ones({16}); },
      "expected no lora_magnitude_vector without use_dora");
  refuse([&](StateDict& s) { s["base_model.model.model.layers.0.self_attn.q_proj.other"] = ones({16}); },
         "unexpected: base_model.model.model.layers.0.self_attn.q_proj.other");
}

TEST_F(Adapter, OfAnEncoder) {
  const StateDict data = io::load(kFixtures / "bert" / "expected.safetensors");
  const auto features = [&](const nn::Bert& bert) {
    return bert.pooled(bert(data.at("tokens"), data.at("visible"), data.at("types")));
  };
  nn::Bert model = io::load_pretrained<nn::Bert>(kFixtures / "bert");
  const Tensor before = features(model).detach();
  const auto names = nn::add_lora(model, {"*.query", "*.output.dense", "pooler.dense"}, {.rank = 2, .alpha = 6});
  expect_close(features(model), before, 0, 0);
  manual_seed(4);
  optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = 0.02});
  const Tensor target = randn(before.shape());
  const auto loss = [&] { return sum(pow(features(model) - target, 2)); };
  const double first = loss().item();
  for (int i = 0; i < 20; ++i) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
  }
  EXPECT_LT(loss().item(), 0.7 * first);
  const Tensor after = features(model).detach();

  io::save_adapter(model, folder_, "bert");
  nn::Bert again = io::load_pretrained<nn::Bert>(kFixtures / "bert");
  io::load_adapter(again, folder_);
  EXPECT_EQ(nn::adapted_layers(again).size(), names.size());
  expect_close(features(again), after, 0, 0);
  nn::merge_lora(again);
  expect_close(features(again), after, 1e-5, 1e-5);
  if (const char* kept = std::getenv("MICA_SAVED_ADAPTERS")) {  // for check_adapters.py
    io::save_adapter(model, fs::path(kept) / "bert", "bert");
    io::save(fs::path(kept) / "bert" / "pooled.safetensors", {{"pooled", after}});
  }
  nn::Llama llama = io::load_pretrained<nn::Llama>(kFixtures / "llama3");
  expect_error([&] { io::load_adapter(llama, folder_); }, "the model has no linear layer encoder.layer.0.attention");
}

// PEFT trains the head of a classifier as a whole; layers have transformers' names, which differ from state_dict()'s.
TEST_F(Adapter, OfAClassifier) {
  const StateDict data = io::load(kFixtures / "xlm_roberta_sequence" / "expected.safetensors");
  std::vector<double> expected;
  const io::JsonValue file = io::read_json(kAdapters / "classifier" / "logits.json", 1 << 20);
  for (const io::JsonValue& value : *file.as<io::JsonValue::Array>()) {
    expected.push_back(*value.as<double>());
  }
  nn::Bert model = io::load_pretrained<nn::Bert>(kFixtures / "xlm_roberta_sequence");
  io::load_adapter(model, kAdapters / "classifier");
  const auto logits = [&](const nn::Bert& bert) {
    return bert.logits(bert(data.at("tokens"), data.at("visible"), data.at("types")));
  };
  expect_close(logits(model), expected, 1e-5, 1e-5);
  io::save_adapter(model, folder_);
  nn::Bert again = io::load_pretrained<nn::Bert>(kFixtures / "xlm_roberta_sequence");
  io::load_adapter(again, folder_);
  expect_close(logits(again), logits(model), 0, 0);
  if (const char* kept = std::getenv("MICA_SAVED_ADAPTERS")) {  // for check_adapters.py
    io::save_adapter(model, fs::path(kept) / "classifier", "xlm_roberta_sequence");
  }
  EXPECT_EQ(io::load(folder_ / "adapter_model.safetensors").size(),
            io::load(kAdapters / "classifier" / "adapter_model.safetensors").size());
}

// QLoRA (Dettmers et al., 2023): training on a quantized model is training on a model of the rounded weights.
void expect_trains_on_quantized(int bits, DType dtype, Device device, const fs::path& folder) {
  SCOPED_TRACE(fmt::format("{} bits, {} on {}", bits, dtype, device));
  const StateDict data = io::load(kFixtures / "llama3" / "expected.safetensors");
  const Tensor tokens = data.at("tokens").to(device), targets = data.at("targets").to(device);
  const auto loaded = [&] {
    return io::load_pretrained<nn::Llama>(kFixtures / "llama3", {.device = device, .dtype = dtype});
  };
  const QuantizeOptions options{.bits = bits, .group_size = 32};
  nn::Llama model = loaded(), rounded = loaded();
  nn::quantize(model, options);
  for (const auto& [name, quantized] : nn::linear_layers(model)) {
    for (const auto& [other, layer] : nn::linear_layers(rounded)) {
      if (other == name) {
        layer->weight.set_data(clone(transpose(dequantize(quantized->quantized, dtype), 0, 1)));
      }
    }
  }
  io::load_adapter(model, kAdapters / "llama3" / "start");
  io::load_adapter(rounded, kAdapters / "llama3" / "start");
  const Tensors trained = nn::trainable_parameters(model), reference = nn::trainable_parameters(rounded);
  ASSERT_EQ(trained.size(), 2 * nn::adapted_layers(model).size());
  const StateDict before = model.state_dict();
  std::vector<Tensor> integers;
  for (const auto& [name, tensor] : before) {
    integers.push_back(name.ends_with(".packed") ? clone(tensor) : Tensor{});
  }

  const double tolerance = dtype == bfloat16 ? 0.05 : dtype == float32 ? 1e-4 : 1e-12;
  optim::AdamW optimizer(trained, {.lr = 1e-2}), other(reference, {.lr = 1e-2});
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    other.zero_grad();
    const Tensor loss = model.loss(tokens, targets), expected = rounded.loss(tokens, targets);
    last = loss.item();
    first = step == 0 ? last : first;
    ASSERT_NEAR(last, expected.item(), 20 * tolerance) << "step " << step;
    loss.backward();
    expected.backward();
    for (std::size_t i = 0; step == 0 && i < trained.size(); ++i) {
      const double size = max(abs(reference[i].grad())).item();
      expect_close(trained[i].grad(), to_vector<double>(reference[i].grad()), tolerance, tolerance * size);
    }
    optimizer.step();
    other.step();
  }
  EXPECT_LT(last, first - 0.1);
  std::size_t at = 0;
  for (const auto& [name, tensor] : model.state_dict()) {
    if (integers[at].defined()) {
      expect_close(tensor, integers[at], 0, 0, name);
      EXPECT_FALSE(tensor.grad().defined());
    }
    ++at;
  }

  // The adapter fits the quantized model, and the model in full.
  const autograd::NoGrad no_grad;
  io::save_adapter(model, folder);
  nn::Llama again = loaded();
  nn::quantize(again, options);
  io::load_adapter(again, folder);
  expect_close(again(tokens), model(tokens), 0, 0);
  expect_error([&] { nn::merge_lora(again); }, "is quantized");
  EXPECT_FALSE(nn::adapted_layers(again).empty());
  nn::Llama full = loaded();
  io::load_adapter(full, folder);
  nn::merge_lora(full);
  EXPECT_NEAR(full.loss(tokens, targets).item(), model.loss(tokens, targets).item(), bits == 8 ? 0.05 : 0.3);
}

TEST_F(Adapter, TrainsOnQuantizedWeights) {
  for (const Device device : test_devices()) {
    for (const int bits : {8, 4}) {
      for (const DType dtype : {float64, float32, bfloat16}) {
        expect_trains_on_quantized(bits, dtype, device, folder_);
      }
    }
  }
}

/// The adapter's tensors, and the targets in its configuration.
std::pair<StateDict, std::set<std::string>> saved_in(const fs::path& folder) {
  const io::JsonValue config = io::read_json(folder / "adapter_config.json", 1 << 20);
  std::set<std::string> targets;
  for (const io::JsonValue& target : *config.find("target_modules")->as<io::JsonValue::Array>()) {
    targets.insert(*target.as<std::string>());
  }
  return {io::load(folder / "adapter_model.safetensors"), targets};
}

// transformers' GPT2LMHeadModel has a "transformer" and, beside it, an "lm_head".
template <class Model>
void expect_head_is_found(const std::string& fixture, const std::string& layer, const std::string& target,
                          const fs::path& folder) {
  SCOPED_TRACE(fixture);
  const auto loaded = [&](DType dtype = float32) {
    return io::load_pretrained<Model>(kFixtures / fixture, {.dtype = dtype});
  };
  const Tensor tokens = io::load(kFixtures / fixture / "expected.safetensors").at("tokens");
  const autograd::NoGrad no_grad;
  manual_seed(7);
  Model model = loaded();
  EXPECT_EQ(nn::add_lora(model, {layer, "lm_head"}, {.rank = 2}), (std::vector<std::string>{layer, "lm_head"}));
  for (const Tensor& parameter : nn::trainable_parameters(model)) {
    parameter.set_data(randn(parameter.shape()));
  }
  io::save_adapter(model, folder);
  auto [state, targets] = saved_in(folder);
  EXPECT_EQ(targets, (std::set<std::string>{target, "lm_head"}));
  std::set<std::string> names, expected;
  for (const auto& [name, tensor] : state) {
    names.insert(name);
  }
  for (const std::string& each : targets) {
    expected.insert("base_model.model." + each + ".lora_A.weight");
    expected.insert("base_model.model." + each + ".lora_B.weight");
  }
  EXPECT_EQ(names, expected);
  Model again = loaded();
  io::load_adapter(again, folder);
  expect_close(again(tokens), model(tokens), 0, 0);

  // PEFT also writes the weight below the head's adapter.
  const fs::path file = folder / "adapter_model.safetensors";
  const std::string below = "base_model.model.lm_head.base_layer.weight";
  for (const DType dtype : {float32, bfloat16}) {  // the file's
    for (const DType own : {float32, bfloat16}) {
      state[below] = model.lm_head.weight.detach().to(dtype);
      io::save(file, state);
      Model same = loaded(own);
      io::load_adapter(same, folder);
      EXPECT_EQ(nn::adapted_layers(same).size(), 2u);
      if (own == float32) {
        expect_close(same(tokens), model(tokens), 0, 0);
      }
    }
  }
  Model quantized = loaded();
  nn::quantize(quantized, {.bits = 8});
  io::load_adapter(quantized, folder);  // the copy differs by rounding
  EXPECT_EQ(nn::adapted_layers(quantized).size(), 2u);
  Model other = loaded();
  state[below] = model.lm_head.weight.detach() * 1.5;
  io::save(file, state);
  expect_error([&] { io::load_adapter(other, folder); }, "lm_head: it was trained on another weight");
  state[below] = ones({2, 2});
  io::save(file, state);
  expect_error([&] { io::load_adapter(other, folder); }, "lm_head: it was trained on another weight");
  EXPECT_TRUE(nn::adapted_layers(other).empty());
}

TEST_F(Adapter, OfAHead) {
  expect_head_is_found<nn::GPT>("gpt2", "h.1.attn.c_attn", "transformer.h.1.attn.c_attn", folder_);
  expect_head_is_found<nn::Llama>("llama3", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", folder_);
  // mica once wrote the head of GPT-2 like its other layers.
  nn::GPT model = io::load_pretrained<nn::GPT>(kFixtures / "gpt2");
  nn::add_lora(model, {"lm_head"});
  io::save_adapter(model, folder_);
  StateDict state = saved_in(folder_).first, old = state;
  for (const auto& [name, tensor] : state) {
    old["base_model.model.transformer." + name.substr(std::string("base_model.model.").size())] = tensor;
  }
  io::save(folder_ / "adapter_model.safetensors", old);
  nn::GPT again = io::load_pretrained<nn::GPT>(kFixtures / "gpt2");
  expect_error([&] { io::load_adapter(again, folder_); },
               "lm_head: it has two tensors base_model.model.transformer.lm_head.lora_A.weight");
  for (const auto& [name, tensor] : state) {
    old.erase(name);
  }
  io::save(folder_ / "adapter_model.safetensors", old);
  io::load_adapter(again, folder_);
  expect_close(again.lm_head.lora_a, model.lm_head.lora_a, 0, 0);
}

TEST_F(Adapter, RankStabilizedScale) {
  const Tensor tokens = io::load(kFixtures / "llama3" / "expected.safetensors").at("tokens");
  fs::copy(kAdapters / "llama3" / "trained", folder_);
  const std::string config = contents(folder_ / "adapter_config.json");
  const autograd::NoGrad no_grad;
  const auto logits = [&](const std::string& alpha, const std::string& by_root) {
    std::string changed = config;
    for (const auto& [from, to] :
         {std::pair<std::string, std::string>{R"("lora_alpha": 12)", alpha}, {R"("use_rslora": false)", by_root}}) {
      const std::size_t at = changed.find(from);
      EXPECT_NE(at, std::string::npos) << from;
      changed.replace(at, from.size(), to);
    }
    std::ofstream(folder_ / "adapter_config.json") << changed;
    nn::Llama model = io::load_pretrained<nn::Llama>(kFixtures / "llama3");
    io::load_adapter(model, folder_);
    return model(tokens);
  };
  // alpha / √r instead of alpha / r, for r = 4.
  const Tensor expected = logits(R"("lora_alpha": 24)", R"("use_rslora": false)");
  expect_close(logits(R"("lora_alpha": 12)", R"("use_rslora": true)"), expected, 1e-6, 1e-6);
  EXPECT_GT(max(abs(logits(R"("lora_alpha": 12)", R"("use_rslora": false)") - expected)).item(), 0.01);
}

TEST_F(Adapter, Errors) {
  nn::Llama llama = io::load_pretrained<nn::Llama>(kFixtures / "llama3");
  expect_error([&] { io::save_adapter(llama, folder_); }, "save_adapter: the model has no adapters");
  expect_error([&] { io::load_adapter(llama, folder_ / "none"); },
               "load_adapter: cannot open the folder " + (folder_ / "none").string() + ": No such file or directory");
  fs::copy(kAdapters / "llama3" / "start", folder_);
  const std::string config = [&] {
    std::ifstream in(folder_ / "adapter_config.json");
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  const auto expect_refused = [&](const std::string& from, const std::string& to, const std::string& message) {
    std::string changed = config;
    const std::size_t at = changed.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    std::ofstream(folder_ / "adapter_config.json") << changed.replace(at, from.size(), to);
    expect_error([&] { io::load_adapter(llama, folder_); }, message);
    EXPECT_TRUE(nn::adapted_layers(llama).empty());
    EXPECT_TRUE(llama.lm_head.weight.requires_grad());
  };
  expect_refused("\"LORA\"", "\"IA3\"", "expected peft_type LORA");
  expect_refused("\"use_dora\": false", "\"use_dora\": true",
                 "model.layers.0.mlp.down_proj: expected a floating lora_magnitude_vector [16]");
  expect_refused("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 2}",
                 "model.layers.0.self_attn.q_proj: expected floating lora_A [2, 16]");
  expect_refused("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": 0.5}", "expected a whole number r");
  expect_refused("\"rank_pattern\": {}", "\"rank_pattern\": {\"q_proj\": \"2\"}", "rank_pattern: expected numbers");
  expect_refused("\"rank_pattern\": {}", "\"rank_pattern\": [1]", "rank_pattern: expected an object");
  expect_refused("\"rank_pattern\": {}", "\"rank_pattern\": {\"(q|v)_proj\": 2}",
                 "rank_pattern: the pattern \"(q|v)_proj\" is not supported");
  expect_refused("\"alpha_pattern\": {}", R"("alpha_pattern": {"q_proj": 2, "layers.\\d+.*proj": 3})",
                 "two patterns with different numbers match model.layers.0.self_attn.q_proj");
  expect_refused("\"modules_to_save\": null", "\"modules_to_save\": \"norm\"", "modules_to_save: expected a list");
  // These change the weights below, or what the adapter computes with them.
  expect_refused(R"("alora_invocation_tokens": null)", R"("alora_invocation_tokens": [3])",
                 "alora_invocation_tokens is not supported");
  for (const std::string name : {"kasa_config", "arrow_config", "use_bdlora"}) {
    expect_refused(fmt::format(R"("{}": null)", name), fmt::format(R"("{}": {{}})", name), name + " is not supported");
  }
  for (const std::string start : {"pissa", "pissa_niter_4", "OLoRA", "loftq", "corda", "lora_ga"}) {
    expect_refused("\"init_lora_weights\": true", fmt::format(R"("init_lora_weights": "{}")", start),
                   fmt::format("init_lora_weights is \"{}\", which is not supported", start));
  }
  expect_refused("\"bias\": \"none\"", "\"bias\": \"some\"", "expected bias none, all or lora_only");
  expect_refused("\"r\": 4", "\"r\": 0", "expected a whole number r of at least 1");
  expect_refused("\"r\": 4", "\"r\": 3", "expected floating lora_A [3, 16] and lora_B");
  expect_refused("\"lora_alpha\": 12", "\"lora_alpha\": \"12\"", "expected a number lora_alpha");
  expect_refused("\"lora_dropout\": 0.0", "\"lora_dropout\": 1", "expected lora_dropout in [0, 1)");
  expect_refused("{", "[", "adapter_config.json");
  for (const std::string start : {"gaussian", "EVA", "orthogonal"}) {  // no difference once it is trained
    std::string changed = config;
    const std::string from = "\"init_lora_weights\": true";
    changed.replace(changed.find(from), from.size(), fmt::format(R"("init_lora_weights": "{}")", start));
    std::ofstream(folder_ / "adapter_config.json") << changed;
    nn::Llama other = io::load_pretrained<nn::Llama>(kFixtures / "llama3");
    io::load_adapter(other, folder_);
    EXPECT_FALSE(nn::adapted_layers(other).empty());
  }
  std::ofstream(folder_ / "adapter_config.json") << config;
  StateDict state = io::load(folder_ / "adapter_model.safetensors");
  const std::string layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
  const Tensor up = state.at(layer);
  state.erase(layer);
  state["base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight"] = up;
  state["other"] = up;
  io::save(folder_ / "adapter_model.safetensors", state);
  expect_error([&] { io::load_adapter(llama, folder_); }, "unexpected: other");
  expect_error([&] { io::load_adapter(llama, folder_); },
               "the model has no linear layer model.layers.9.self_attn.q_proj");
  expect_error([&] { io::load_adapter(llama, folder_); },
               "model.layers.0.self_attn.q_proj: expected floating lora_A [4, 16]");
  io::save(folder_ / "adapter_model.safetensors", {});
  expect_error([&] { io::load_adapter(llama, folder_); }, "it has no adapters");
  io::load_adapter(llama, kAdapters / "llama3" / "start");
  expect_error([&] { io::load_adapter(llama, kAdapters / "llama3" / "start"); }, "the model already has adapters");
  expect_error([&] { io::save_pretrained(llama, folder_); }, "is part of an adapter");
}

}  // namespace
