#include <tests/io/pretrained_folder.h>

#include <mica/autograd/grad_mode.h>
#include <mica/core/rng.h>
#include <mica/io/adapter.h>
#include <mica/io/gguf.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/nn/lora.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
using namespace mica::pretrained_testing;

namespace {

// pretrained_test.cpp compares what a model computes and generates with transformers; gguf_test.cpp, what it computes
// from a file of llama.cpp.

class GemmaFiles : public Pretrained {};

TEST_F(GemmaFiles, Configuration) {
  const auto c = std::get<nn::GemmaConfig>(io::load_pretrained_config(kFixtures / "gemma2"));
  EXPECT_EQ(c.window, 16);
  EXPECT_EQ(c.head_width, 8);
  EXPECT_EQ(c.query_scale, 12);
  EXPECT_EQ(c.attention_cap, 2);
  EXPECT_EQ(c.logit_cap, 4);
  EXPECT_EQ(c.rotary.theta, 1000);
  // Google's files have few entries; transformers has defaults for the others.
  const auto defaults = std::get<nn::GemmaConfig>(io::pretrained_config(
      io::parse_json(R"({"model_type": "gemma2", "vocab_size": 256000, "max_position_embeddings": 8192,
                         "num_hidden_layers": 26, "num_attention_heads": 8, "hidden_size": 2304,
                         "intermediate_size": 9216})",
                     "test"),
      "test"));
  EXPECT_EQ(io::to_json({io::config_entries(defaults)}), io::to_json({io::config_entries(nn::GemmaConfig{})}));
  EXPECT_EQ(io::parameter_count(defaults), 2614341888);
  nn::GemmaConfig uncapped = defaults;
  uncapped.attention_cap = uncapped.logit_cap = 0;
  uncapped.query_scale = 2.5;
  const auto again = std::get<nn::GemmaConfig>(io::pretrained_config({io::config_entries(uncapped)}, "test"));
  EXPECT_EQ(again.attention_cap, 0);
  EXPECT_EQ(again.logit_cap, 0);
  EXPECT_EQ(again.query_scale, 2.5);
}

TEST_F(GemmaFiles, EntriesThatMicaDoesNotSupport) {
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& message) {
    copy_with("gemma2", from, to);
    expect_refused(message);
  };
  refused("\"sliding_attention\",", "\"chunked_attention\",",
          "expected \"sliding_attention\" or \"full_attention\" for each of 2 layers");
  refused("\"sliding_window\": 16", "\"sliding_window\": null",
          "\"sliding_window\" is nothing, expected a whole number");
  refused("\"gelu_pytorch_tanh\"", "\"gelu\"", "\"hidden_activation\" is \"gelu\"");
  refused("\"attention_bias\": false", "\"attention_bias\": true", "\"attention_bias\" is true");
  refused("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\" is false");
  refused("\"use_bidirectional_attention\": null", "\"use_bidirectional_attention\": true",
          "\"use_bidirectional_attention\" is true");
  refused("\"attn_logit_softcapping\": 2.0", "\"attn_logit_softcapping\": 0",
          "\"attn_logit_softcapping\" is 0, expected a number above 0, or null for no cap");
  refused("\"head_dim\": 8", "\"head_dim\": 7", "\"head_dim\" is 7, expected an even number");
  refused("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "\"num_key_value_heads\" is 3");
}

TEST_F(GemmaFiles, GgufKeepsTheModel) {
  manual_seed(3);
  nn::Gemma model({.vocab = 32,
                   .context = 64,
                   .window = 16,
                   .layers = 2,
                   .heads = 4,
                   .key_heads = 2,
                   .head_width = 8,
                   .width = 32,
                   .hidden = 32,
                   .query_scale = 8,
                   .attention_cap = 2,
                   .logit_cap = 3});
  for (const Tensor& parameter : model.parameters()) {
    parameter.set_data(randn(parameter.shape()) * 0.3);
  }
  const fs::path path = folder_ / "gemma2.gguf";
  io::save_gguf(path, model);
  const nn::Gemma again = io::load_pretrained<nn::Gemma>(path);
  EXPECT_EQ(io::to_json({io::config_entries(again.config)}), io::to_json({io::config_entries(model.config)}));
  const StateDict expected = model.state_dict();
  for (const auto& [name, tensor] : again.state_dict()) {
    // llama.cpp's norms are 1 + weight.
    const bool is_norm = name.ends_with("norm.weight");
    expect_close(tensor, expected.at(name), 0, is_norm ? 2e-7 : 0, name);
  }
  const autograd::NoGrad no_grad;
  const Tensor tokens = randint(0, 32, {1, 9});
  expect_close(again(tokens), model(tokens), 1e-5, 1e-6);

  model.config.query_scale = 9;
  expect_error([&] { io::save_gguf(path, model); }, "save_gguf: llama.cpp's Gemma 2 has a query_scale of 8, got 9");
  model.config.query_scale = 8;
  model.config.logit_cap = 0;
  expect_error([&] { io::save_gguf(path, model); }, "save_gguf: llama.cpp's Gemma 2 has caps");
}

TEST_F(GemmaFiles, Adapters) {
  nn::Gemma model = io::load_pretrained<nn::Gemma>(kFixtures / "gemma2");
  nn::add_lora(model, {"*q_proj", "*down_proj"}, {.rank = 2, .alpha = 4});
  for (const nn::AdaptedLayer& layer : nn::adapted_layers(model)) {
    layer.layer->lora_b.set_data(randn(layer.layer->lora_b.shape()));
  }
  io::save_adapter(model, folder_);
  const StateDict files = io::load(folder_ / "adapter_model.safetensors");
  EXPECT_TRUE(files.contains("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"));
  nn::Gemma again = io::load_pretrained<nn::Gemma>(kFixtures / "gemma2");
  io::load_adapter(again, folder_);
  const autograd::NoGrad no_grad;
  const Tensor tokens = randint(0, 43, {2, 5});
  expect_close(again(tokens), model(tokens), 0, 0);
}

}  // namespace
