#include <sys/stat.h>
#include <tests/io/pretrained_folder.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <variant>

#include <mica/core/creation.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>
#include <mica/io/tokenizer.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::pretrained_testing;

namespace {

TEST_F(Pretrained, Configurations) {
  const auto gpt = std::get<nn::GPTConfig>(io::load_pretrained_config(kFixtures / "gpt2_gelu_sharded"));
  EXPECT_EQ(gpt.vocab, 41);
  EXPECT_EQ(gpt.context, 16);
  EXPECT_EQ(gpt.gelu, GeluApproximation::none);
  EXPECT_EQ(gpt.norm_eps, 1e-3);
  EXPECT_EQ(gpt.dropout, 0.1);
  const auto llama = std::get<nn::LlamaConfig>(io::load_pretrained_config(kFixtures / "llama3"));
  EXPECT_EQ(llama.rotary.scaling, nn::RotaryScaling::llama3);
  EXPECT_EQ(llama.rotary.theta, 1000);
  EXPECT_EQ(llama.rotary.original_context, 16);
  EXPECT_FALSE(llama.tied_head);
  EXPECT_FALSE(llama.qkv_bias);
  const auto smollm = std::get<nn::LlamaConfig>(io::load_pretrained_config(kFixtures / "smollm"));
  EXPECT_EQ(smollm.rotary.scaling, nn::RotaryScaling::none);
  EXPECT_EQ(smollm.rotary.theta, 1000);
  EXPECT_EQ(smollm.norm_eps, 1e-5);
  EXPECT_TRUE(smollm.tied_head);
  const auto mistral = std::get<nn::LlamaConfig>(io::load_pretrained_config(kFixtures / "mistral"));
  EXPECT_EQ(mistral.rotary.scaling, nn::RotaryScaling::none);
  EXPECT_EQ(mistral.head_width, 6);
  EXPECT_FALSE(mistral.tied_head);
  const auto qwen2 = std::get<nn::LlamaConfig>(io::load_pretrained_config(kFixtures / "qwen2"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_TRUE(qwen2.tied_head);
  const auto qwen3 = std::get<nn::LlamaConfig>(io::load_pretrained_config(kFixtures / "qwen3"));
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_EQ(qwen3.head_width, 8);
  for (const std::string& name : kModels) {
    const io::PretrainedModel model = io::load_pretrained(kFixtures / name);
    std::visit(
        [&](const auto& m) {
          std::int64_t elements = 0;
          for (const Tensor& parameter : m.parameters()) {
            elements += parameter.numel();
          }
          EXPECT_EQ(io::parameter_count(io::PretrainedConfig(m.config)), elements) << name;
        },
        model);
  }
}

TEST_F(Pretrained, ReadsOldConfigurationsToo) {
  // transformers 4: rope_theta and rope_scaling, the latter with "type" or "rope_type".
  const std::string shape =
      R"("model_type":"llama","vocab_size":9,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,)"
      R"("num_attention_heads":2,"max_position_embeddings":32)";
  const auto rotary = [&](const std::string& entries) {
    const io::JsonValue json = io::parse_json("{" + shape + entries + "}", "test");
    return std::get<nn::LlamaConfig>(io::pretrained_config(json, "test")).rotary;
  };
  EXPECT_EQ(rotary("").theta, 10000);
  EXPECT_EQ(rotary(R"(,"rope_theta":500000,"rope_scaling":null)").theta, 500000);
  const nn::RotaryConfig linear = rotary(R"(,"rope_scaling":{"type":"linear","factor":2})");
  EXPECT_EQ(linear.scaling, nn::RotaryScaling::linear);
  EXPECT_EQ(linear.factor, 2);
  const nn::RotaryConfig dynamic = rotary(R"(,"rope_scaling":{"rope_type":"dynamic","factor":2.5})");
  EXPECT_EQ(dynamic.scaling, nn::RotaryScaling::dynamic);
  EXPECT_EQ(dynamic.original_context, 32);
  const nn::RotaryConfig yarn = rotary(
      R"(,"rope_scaling":{"rope_type":"yarn","original_max_position_embeddings":8,"mscale":0.5,"mscale_all_dim":1})");
  EXPECT_EQ(yarn.factor, 4);
  EXPECT_NEAR(*yarn.attention_factor, (0.05 * std::log(4) + 1) / (0.1 * std::log(4) + 1), 1e-12);
}

// What tests/pretrained/make_rotary.py wrote: frequencies and scales that transformers makes of rotary entries, as in
// published configurations and in others.
TEST_F(Pretrained, RotaryEntriesMeanWhatTheyMeanToTransformers) {
  const io::JsonValue cases = io::read_json(kFixtures / "rotary.json", 1 << 20);
  std::set<nn::RotaryScaling> scalings;
  for (const io::JsonValue& c : *cases.as<io::JsonValue::Array>()) {
    const std::string name = *c.find("name")->as<std::string>();
    SCOPED_TRACE(name);
    const auto config = std::get<nn::LlamaConfig>(io::pretrained_config(*c.find("config"), name));
    scalings.insert(config.rotary.scaling);
    const nn::RotaryEmbedding embedding(config.head_width, config.rotary);
    EXPECT_NEAR(embedding.scale(), *c.find("scale")->as<double>(), 1e-12);
    for (const io::JsonValue& at : *c.find("lengths")->as<io::JsonValue::Array>()) {
      const std::int64_t length = *at.find("length")->as<std::int64_t>();
      const auto& theirs = *at.find("frequencies")->as<io::JsonValue::Array>();
      const std::vector<float> got = nn::rotary_frequencies(config.head_width, config.rotary, length);
      ASSERT_EQ(got.size(), theirs.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double expected = *theirs[i].as<double>();
        EXPECT_NEAR(got[i], expected, 4e-7 * expected) << "frequency " << i << " at length " << length;
      }
    }
    // What is saved says the same.
    const auto again = std::get<nn::LlamaConfig>(io::pretrained_config({io::config_entries(config)}, name));
    EXPECT_EQ(io::to_json({io::config_entries(again)}), io::to_json({io::config_entries(config)}));
    EXPECT_EQ(nn::rotary_frequencies(config.head_width, again.rotary, 1000),
              nn::rotary_frequencies(config.head_width, config.rotary, 1000));
    EXPECT_EQ(nn::rotary_scale(again.rotary), embedding.scale());
  }
  EXPECT_EQ(scalings.size(), 6U);  // all that there are
}

// The entries of published configurations, without the sizes.
TEST_F(Pretrained, PublishedConfigurations) {
  const auto read = [](const std::string& entries) {
    const std::string shape = R"({"vocab_size":64,"hidden_size":64,"intermediate_size":64,"num_attention_heads":4,)";
    return std::get<nn::LlamaConfig>(io::pretrained_config(io::parse_json(shape + entries + "}", "test"), "test"));
  };
  // SmolLM3-3B.
  const nn::LlamaConfig smollm3 =
      read(R"("model_type":"smollm3","attention_bias":false,"hidden_act":"silu","max_position_embeddings":65536,)"
           R"("max_window_layers":28,"mlp_bias":false,"no_rope_layer_interval":4,"num_hidden_layers":8,)"
           R"("no_rope_layers":[1,1,1,0,1,1,1,0],"num_key_value_heads":4,"pretraining_tp":2,"rms_norm_eps":1e-06,)"
           R"("rope_scaling":null,"rope_theta":5000000.0,"sliding_window":null,"use_sliding_window":false)");
  EXPECT_EQ(smollm3.rotated_layers, (std::vector<bool>{true, true, true, false, true, true, true, false}));
  EXPECT_EQ(smollm3.rotary.theta, 5e6);
  EXPECT_TRUE(smollm3.tied_head);
  EXPECT_EQ(read(R"("model_type":"smollm3","max_position_embeddings":64,"num_hidden_layers":5,"no_rope_layers":null)")
                .rotated_layers,
            (std::vector<bool>{true, true, true, false, true}));
  // TinyLlama.
  const nn::LlamaConfig tiny = read(
      R"("model_type":"llama","attention_bias":false,"hidden_act":"silu","max_position_embeddings":2048,)"
      R"("num_hidden_layers":2,"num_key_value_heads":4,"pretraining_tp":1,"rms_norm_eps":1e-05,"rope_scaling":null,)"
      R"("rope_theta":10000.0,"tie_word_embeddings":false)");
  EXPECT_TRUE(tiny.rotated_layers.empty());
  EXPECT_FALSE(tiny.tied_head);
  // Qwen2.5, whose window is not in use.
  const nn::LlamaConfig qwen =
      read(R"("model_type":"qwen2","hidden_act":"silu","max_position_embeddings":32768,"max_window_layers":21,)"
           R"("num_hidden_layers":2,"num_key_value_heads":2,"rms_norm_eps":1e-06,"rope_theta":1000000.0,)"
           R"("sliding_window":32768,"tie_word_embeddings":true,"use_mrope":false,"use_sliding_window":false)");
  EXPECT_TRUE(qwen.qkv_bias);
  EXPECT_EQ(qwen.rotary.theta, 1e6);
  // A Qwen 2 that sees both ways, made for embeddings of text.
  expect_error(
      [&] { read(R"("model_type":"qwen2","max_position_embeddings":64,"num_hidden_layers":1,"is_causal":false)"); },
      "\"is_causal\" is false, expected true");
  // Phi 3 mini, Phi 4 and Phi 4 mini.
  const nn::LlamaConfig phi3 =
      read(R"("model_type":"phi3","attention_bias":false,"embd_pdrop":0.0,"hidden_act":"silu","num_hidden_layers":2,)"
           R"("max_position_embeddings":4096,"original_max_position_embeddings":4096,"resid_pdrop":0.0,)"
           R"("rms_norm_eps":1e-05,"rope_scaling":null,"rope_theta":10000.0,"sliding_window":2047)");
  EXPECT_EQ(phi3.window, 2047);
  EXPECT_TRUE(phi3.fused_files);
  EXPECT_EQ(phi3.rotary.width, 0);
  const nn::LlamaConfig phi4_mini =
      read(R"("model_type":"phi3","max_position_embeddings":131072,"original_max_position_embeddings":4096,)"
           R"("num_hidden_layers":2,"num_key_value_heads":2,"partial_rotary_factor":0.75,"tie_word_embeddings":true,)"
           R"("rope_scaling":{"long_factor":[1,2,3,4,5,6],"short_factor":[1,1,1,1,1,1],"type":"longrope"},)"
           R"("rms_norm_eps":1e-05,"rope_theta":10000.0,"sliding_window":262144)");
  EXPECT_EQ(phi4_mini.rotary.width, 12);
  EXPECT_EQ(phi4_mini.rotary.factor, 32);
  EXPECT_EQ(phi4_mini.rotary.original_context, 4096);
  EXPECT_TRUE(phi4_mini.rotary.recompute);
  // Granite 3.
  const nn::LlamaConfig granite =
      read(R"("model_type":"granite","attention_bias":false,"attention_multiplier":0.015625,"hidden_act":"silu",)"
           R"("embedding_multiplier":12.0,"logits_scaling":8.0,"max_position_embeddings":4096,"mlp_bias":false,)"
           R"("num_hidden_layers":2,"num_key_value_heads":2,"residual_multiplier":0.22,"rms_norm_eps":1e-05,)"
           R"("rope_scaling":null,"rope_theta":10000.0,"tie_word_embeddings":true)");
  EXPECT_EQ(granite.attention_scale, 0.015625);
  EXPECT_EQ(granite.logit_divisor, 8);
  // Mistral 7B 0.1 has a window.
  EXPECT_EQ(
      read(R"("model_type":"mistral","max_position_embeddings":64,"num_hidden_layers":1,"sliding_window":512)").window,
      512);
  EXPECT_EQ(read(R"("model_type":"mistral","max_position_embeddings":64,"num_hidden_layers":1)").window, 4096);
}

// transformers computes gelu_new and gelu_pytorch_tanh with different roundings, and has three dropouts for GPT-2. What
// a file says of them stays as it is.
TEST_F(Pretrained, KeepsNamesOfActivationsAndDropouts) {
  const auto entry = [&](const char* name) {
    const io::JsonValue config = io::read_json(folder_ / "config.json", 1 << 20);
    return config.find(name)->value;
  };
  const auto save_again = [&] {
    io::PretrainedModel model = io::load_pretrained(folder_);
    io::save_pretrained(model, folder_);
    return model;
  };
  for (const std::string name : {"gelu_new", "gelu_pytorch_tanh", "gelu"}) {
    copy_with("gpt2", R"("activation_function": "gelu_new")", fmt::format(R"("activation_function": "{}")", name));
    save_again();
    EXPECT_EQ(std::get<std::string>(entry("activation_function")), name);
    copy_with("bert", R"("hidden_act": "gelu")", fmt::format(R"("hidden_act": "{}")", name));
    save_again();
    EXPECT_EQ(std::get<std::string>(entry("hidden_act")), name);
  }
  const std::array<const char*, 3> names{"resid_pdrop", "attn_pdrop", "embd_pdrop"};
  for (const char* const changed : names) {
    SCOPED_TRACE(changed);
    const auto expected = [&](const char* name) { return name == changed ? 0.25 : 0.1; };
    copy_with("gpt2", fmt::format(R"("{}": 0.1)", changed), fmt::format(R"("{}": 0.25)", changed));
    const auto model = std::get<nn::GPT>(save_again());
    for (const char* const name : names) {
      EXPECT_EQ(std::get<double>(entry(name)), expected(name)) << name;
    }
    EXPECT_EQ(model.drop.p, expected("embd_pdrop"));
    EXPECT_EQ(model.h[0].attn.options.attention_dropout.value_or(model.h[0].attn.options.dropout),
              expected("attn_pdrop"));
    EXPECT_EQ(model.h[0].attn.resid_dropout.p, expected("resid_pdrop"));
    EXPECT_EQ(model.h[0].mlp.dropout.p, expected("resid_pdrop"));
  }
}

TEST_F(Pretrained, RefusesFoldersThatCannotBeOpened) {
  const std::string none = (folder_ / "none").string(), reason = none + ": No such file or directory";
  expect_error([&] { io::load_pretrained(none); }, "load_pretrained: cannot open the folder " + reason);
  expect_error([&] { io::load_pretrained_config(none); }, "load_pretrained: cannot open the folder " + reason);
  expect_error([&] { io::load_pretrained_tensors(none); }, "load_pretrained: cannot open the folder " + reason);
  expect_error([&] { io::Tokenizer::load(none); }, "load: cannot open the folder " + reason);
  expect_error([] { io::Tokenizer::load(""); }, "load:  has no tokenizer");  // the current folder
  write("file", "x");
  const std::string file = (folder_ / "file").string();
  expect_error([&] { io::load_pretrained(file); }, "load_pretrained: " + file + " is not a folder");
  expect_error([&] { io::Tokenizer::load(file); }, "load: " + file + " is not a folder");
}

TEST_F(Pretrained, PublishedConfigurationsOfEncoders) {
  const auto read = [](const std::string& entries) {
    const std::string shape = R"({"vocab_size":64,"hidden_size":64,"intermediate_size":64,"num_attention_heads":4,)";
    return io::pretrained_config(io::parse_json(shape + R"("num_hidden_layers":7,)" + entries + "}", "test"), "test");
  };
  // roberta-base, and a reranker.
  const std::string roberta = R"("bos_token_id":0,"eos_token_id":2,"hidden_act":"gelu","layer_norm_eps":1e-05,)"
                              R"("hidden_dropout_prob":0.1,"max_position_embeddings":514,"pad_token_id":1,)"
                              R"("type_vocab_size":1,)";
  const auto base =
      std::get<nn::BertConfig>(read(roberta + R"("model_type":"roberta","architectures":["RobertaForMaskedLM"])"));
  EXPECT_EQ(base.context, 512);
  EXPECT_EQ(base.padding, 1);
  EXPECT_EQ(base.head, nn::EncoderHead::masked_lm);
  const auto reranker = std::get<nn::BertConfig>(
      read(roberta + R"("model_type":"xlm-roberta","architectures":["XLMRobertaForSequenceClassification"],)"
                     R"("classifier_dropout":null,"id2label":{"0":"LABEL_0"},"label2id":{"LABEL_0":0})"));
  EXPECT_EQ(reranker.kind, nn::BertKind::xlm_roberta);
  EXPECT_EQ(reranker.head, nn::EncoderHead::sequence);
  EXPECT_EQ(reranker.labels, 1);
  EXPECT_EQ(reranker.head_dropout, 0.1);
  // DistilBERT.
  const auto distilbert = std::get<nn::BertConfig>(
      io::pretrained_config(io::parse_json(R"({"activation":"gelu","architectures":["DistilBertForMaskedLM"],)"
                                           R"("attention_dropout":0.1,"dim":768,"dropout":0.1,"hidden_dim":3072,)"
                                           R"("max_position_embeddings":512,"model_type":"distilbert","n_heads":12,)"
                                           R"("n_layers":6,"pad_token_id":0,"sinusoidal_pos_embds":false,)"
                                           R"("tie_weights_":true,"vocab_size":30522})",
                                           "test"),
                            "test"));
  EXPECT_EQ(distilbert.types, 0);
  EXPECT_EQ(io::parameter_count(io::PretrainedConfig(distilbert)), 66985530);  // those of DistilBertForMaskedLM
  // ModernBERT-base, written by transformers 4.
  const std::string modern = R"("model_type":"modernbert","architectures":["ModernBertForMaskedLM"],)"
                             R"("classifier_pooling":"mean","decoder_bias":true,"global_attn_every_n_layers":3,)"
                             R"("global_rope_theta":160000.0,"local_rope_theta":9000.0,"local_attention":128,)"
                             R"("layer_norm_eps":1e-05,"max_position_embeddings":8192,"norm_eps":1e-05,)"
                             R"("hidden_activation":"gelu","position_embedding_type":"absolute")";
  const auto modern_bert = std::get<nn::ModernBertConfig>(read(modern));
  EXPECT_EQ(modern_bert.rotary.theta, 160000);
  EXPECT_EQ(modern_bert.local_rotary.theta, 9000);
  EXPECT_TRUE(modern_bert.mean_pooling);
  EXPECT_EQ(modern_bert.windowed_layers, (std::vector<bool>{false, true, true, false, true, true, false}));
  const auto scaled = std::get<nn::ModernBertConfig>(read(modern + R"(,"rope_scaling":{"type":"linear","factor":2})"));
  EXPECT_EQ(scaled.rotary.scaling, nn::RotaryScaling::linear);
  EXPECT_EQ(scaled.rotary.theta, 160000);
  EXPECT_EQ(scaled.local_rotary.factor, 2);
}

TEST_F(Pretrained, RefusesConfigurations) {
  const struct {
    const char *fixture, *from, *to, *message;
  } cases[] = {
      {"llama3", "{", "", "config.json: it is not valid JSON"},
      {"llama3", "{", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[{", "nested more than 32 levels deep"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": 43, "vocab_size": 44)", R"("vocab_size" appears twice)"},
      {"llama3", R"("vocab_size")", R"("vocab")", R"("vocab_size" is missing)"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": null)", R"("vocab_size" is missing)"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": 43.5)", R"("vocab_size" is 43.5, expected a whole number)"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": -1)", R"("vocab_size" is -1, expected a whole number from 1)"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": 99999999999999999999)", "expected a whole number"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": "43")", R"("vocab_size" is "43", expected a whole number)"},
      {"llama3", R"("model_type": "llama")", R"("model_type": "mamba")", R"("model_type" is "mamba", expected one of)"},
      {"llama3", R"("model_type": "llama")", R"("model_type": ["llama"])", "expected a text"},
      {"llama3", "{", R"({"quantization_config": {"quant_method": "gptq", "bits": 4},)",
       "\"quantization_config\": mica reads no quantized checkpoints"},
      {"llama3", "{", R"({"quantization_config": null,)", ""},
      {"llama3", R"("num_key_value_heads": 2)", R"("num_key_value_heads": 3)", R"(expected a divisor of)"},
      {"llama3", R"("head_dim": 4)", R"("head_dim": 5)", R"("head_dim" is 5, expected an even number)"},
      {"llama3", R"("head_dim": 4)", R"("head_dim": 100000)", R"("head_dim" is 100000)"},
      {"llama3", R"("hidden_act": "silu")", R"("hidden_act": "relu")", R"("hidden_act" is "relu")"},
      {"llama3", R"("rms_norm_eps": 1e-06)", R"("rms_norm_eps": -1)", R"("rms_norm_eps" is -1)"},
      {"llama3", R"("rms_norm_eps": 1e-06)", R"("rms_norm_eps": 1e999)", "not valid JSON"},
      {"llama3", R"("attention_bias": false)", R"("attention_bias": 0)", "expected true or false"},
      {"llama3", R"("attention_dropout": 0.0)", R"("attention_dropout": 1.0)", "expected a number in [0, 1)"},
      {"llama3", R"("rope_type": "llama3")", R"("rope_type": "proportional")",
       R"("rope_parameters.rope_type" is "proportional")"},
      {"llama3", R"("rope_type": "llama3")", R"("rope_type": "longrope")",
       R"("rope_parameters.short_factor" is missing)"},
      {"llama3", R"("rope_type": "llama3")", R"("full_attention": {"rope_type": "llama3"})",
       R"("rope_parameters.full_attention" is)"},
      {"llama3", R"("rope_type": "llama3")", R"("rope_type": "llama3", "partial_rotary_factor": 0.5)",
       R"("rope_parameters.partial_rotary_factor" is 0.5, expected 1)"},
      {"phi4_mini", R"("partial_rotary_factor": 0.75)", R"("partial_rotary_factor": 0.7)",
       R"("rope_parameters.partial_rotary_factor" is 0.7, expected a part of the 8 columns of a head: an even number)"},
      {"phi4_mini", R"("partial_rotary_factor": 0.75)", R"("partial_rotary_factor": 1.5)",
       R"("rope_parameters.partial_rotary_factor" is 1.5)"},
      {"phi4_mini", R"("partial_rotary_factor": 0.75)", R"("partial_rotary_factor": 0.5)",
       R"(expected 2 numbers above 0)"},
      {"phi3", R"("rope_type": "default")", R"("rope_type": "linear", "factor": 2.0)",
       R"("rope_parameters.rope_type" is "linear", expected "default" or "longrope")"},
      {"phi3_longrope", R"("rope_type": "longrope")", R"("rope_type": "yarn")", ""},  // its first name
      {"phi3", R"("resid_pdrop": 0.0)", R"("resid_pdrop": 0.1)", R"("resid_pdrop" is 0.1, expected 0)"},
      {"granite", R"("logits_scaling": 3)", R"("logits_scaling": 0)", R"("logits_scaling" is 0, expected a number)"},
      {"starcoder2", R"("hidden_act": "gelu_pytorch_tanh")", R"("hidden_act": "gelu")", R"("hidden_act" is "gelu")"},
      {"starcoder2", R"("num_attention_heads": 4)", R"("num_attention_heads": 3)",
       R"("num_key_value_heads" is 2, expected a divisor of "num_attention_heads", 3)"},
      {"llama3", "{", R"({"partial_rotary_factor": 0.25,)", R"("partial_rotary_factor" is 0.25, expected 1)"},
      {"llama3", "{", R"({"rope_scaling": {"type": "linear"},)", R"("rope_scaling.factor" is missing)"},
      {"llama3", "{", R"({"is_causal": false,)", R"("is_causal" is false, expected true)"},
      {"gpt2", "{", R"({"is_causal": false,)", R"("is_causal" is false, expected true)"},
      {"llama3", "{", R"({"per_layer_config": {"0": {"intermediate_size": 8}},)",
       "\"per_layer_config\": mica's models"},
      {"llama3", "{", R"({"layer_types": ["full_attention", "full_attention"],)", ""},
      {"llama3", "{", R"({"layer_types": ["full_attention"],)", R"("full_attention" 2 times)"},
      {"qwen3", R"("layer_types": [)", R"("layer_types": ["sliding_attention",)", R"("layer_types" is)"},
      {"mistral", R"("sliding_window": null)", R"("sliding_window": 0)", R"("sliding_window" is 0, expected)"},
      {"llama_longrope", R"("short_factor": [)", R"("short_factor": [1.0,)",
       R"("rope_parameters.short_factor" has 5 elements, expected 4 numbers above 0)"},
      {"llama_longrope", R"("long_factor": [)", R"("long_factor": [], "x": [)",
       R"("rope_parameters.long_factor" has 0 elements)"},
      {"llama_longrope", R"("long_factor": [)", R"("long_factor": 3, "x": [)",
       R"("rope_parameters.long_factor" is 3, expected a list of 4 numbers above 0)"},
      {"llama_longrope", R"("long_factor": [)", R"("x": [)", R"("rope_parameters.long_factor" is missing)"},
      {"llama_longrope", "1.125", "0", R"(element 1 of "rope_parameters.short_factor" is 0, expected a finite number)"},
      {"llama_longrope", "1.125", "-1", R"(element 1 of "rope_parameters.short_factor" is -1)"},
      {"llama_longrope", "1.125", "1e39", R"(element 1 of "rope_parameters.short_factor" is 1e+39)"},
      {"llama_longrope", "1.125", "1e-50", R"(element 1 of "rope_parameters.short_factor" is 1e-50)"},
      {"llama_longrope", "1.125", "null", R"(element 1 of "rope_parameters.short_factor" is null)"},
      {"llama_longrope", "6.5", R"("6.5")", R"(element 2 of "rope_parameters.long_factor" is "6.5")"},
      {"llama_longrope", R"("original_max_position_embeddings": 8)", R"("original_max_position_embeddings": 1)",
       R"("rope_parameters.original_max_position_embeddings" is 1, expected more than 1)"},
      {"llama_longrope", R"("original_max_position_embeddings": 8)", R"("original_max_position_embeddings": 0)",
       R"("rope_parameters.original_max_position_embeddings" is 0)"},
      {"llama_longrope", "{", R"({"original_max_position_embeddings": 1,)",
       R"("original_max_position_embeddings" is 1, expected more than 1)"},
      {"mistral_longrope", R"("attention_factor": 1.25)", R"("attention_factor": -1)",
       R"("rope_parameters.attention_factor" is -1)"},
      {"mistral_longrope", R"("factor": 3.0)", R"("factor": 0)", R"("rope_parameters.factor" is 0)"},
      {"mistral_longrope", R"("rope_type": "longrope")", R"("type": "su")", ""},  // its first name
      {"smollm3", R"("no_rope_layers": [)", R"("no_rope_layers": [2,)", "for each of the 3 layers"},
      {"smollm3", R"("no_rope_layers": [)", R"("no_rope_layers": [], "x": [)", R"("no_rope_layers" is)"},
      {"smollm3", R"("no_rope_layer_interval": 2)", R"("no_rope_layer_interval": 0)",
       R"("no_rope_layer_interval" is 0)"},
      {"llama3", R"("factor": 4.0)", R"("factor": 0)", R"("rope_parameters.factor" is 0)"},
      {"llama3", R"("factor": 4.0,)", "", R"("rope_parameters.factor" is missing)"},
      {"llama3", R"("high_freq_factor": 4.0)", R"("high_freq_factor": 1.0)", "more than \"low_freq_factor\""},
      {"llama3", R"("rope_theta": 1000.0)", R"("rope_theta": 1)", "expected a number of at least"},
      {"qwen2", R"("rope_type": "yarn")", R"("rope_type": "yarn", "beta_fast": 0.5)", R"(at least "beta_slow")"},
      {"qwen2", R"("sliding_window": null)", R"("sliding_window": 8)", ""},  // not used: accepted
      {"gpt2", R"("n_head": 2)", R"("n_head": 3)", R"("n_head" is 3, expected a divisor of "n_embd", 16)"},
      {"gpt2", R"("n_inner": null)", R"("n_inner": 32)", R"("n_inner" is 32, expected four times)"},
      {"gpt2", R"("attn_pdrop": 0.1)", R"("attn_pdrop": 0.2)", ""},
      {"gpt2", R"("attn_pdrop": 0.1)", R"("attn_pdrop": 1)", R"("attn_pdrop" is 1, expected a number in [0, 1))"},
      {"gpt2", R"("embd_pdrop": 0.1)", R"("embd_pdrop": -1)", R"("embd_pdrop" is -1)"},
      {"gpt2", R"("scale_attn_weights": true)", R"("scale_attn_weights": false)", "mica has no other"},
      {"gpt2", R"("tie_word_embeddings": true)", R"("tie_word_embeddings": false)",
       R"("tie_word_embeddings" is false, expected true: mica has no other)"},
      {"gpt2", R"("scale_attn_by_inverse_layer_idx": false)", R"("scale_attn_by_inverse_layer_idx": true)",
       R"("scale_attn_by_inverse_layer_idx" is true, expected false)"},
      {"gpt2", R"("add_cross_attention": false)", R"("add_cross_attention": true)",
       R"("add_cross_attention" is true, expected false)"},
      {"bert", "{", R"({"position_embedding_type": "relative_key",)",
       R"("position_embedding_type" is "relative_key", expected "absolute")"},
      {"gpt2", R"("activation_function": "gelu_new")", R"("activation_function": "relu")",
       R"(expected one of "gelu_new")"},
      {"bert", R"("hidden_act": "gelu")", R"("hidden_act": "silu")", R"("hidden_act" is "silu")"},
      {"bert", R"("is_decoder": false)", R"("is_decoder": true)", R"("is_decoder" is true)"},
      {"roberta", R"("max_position_embeddings": 20)", R"("max_position_embeddings": 4)",
       R"("max_position_embeddings" is 4, expected more than "pad_token_id" + 1, 4)"},
      {"roberta", R"("pad_token_id": 3)", R"("pad_token_id": 23)", R"("pad_token_id" is 23, expected a whole number)"},
      {"roberta_masked", R"("tie_word_embeddings": true)", R"("tie_word_embeddings": false)",
       R"("tie_word_embeddings" is false, expected true)"},
      {"distilbert", R"("n_heads": 2)", R"("n_heads": 3)", R"("n_heads" is 3, expected a divisor of "dim", 8)"},
      {"modern_bert", R"("hidden_activation": "gelu")", R"("hidden_activation": "silu")",
       R"("hidden_activation" is "silu", expected one of "gelu_new")"},
      {"modern_bert", R"("num_attention_heads": 2)", R"("num_attention_heads": 8)",
       "heads of an even number of columns"},
      {"modern_bert", R"("classifier_pooling": "cls")", R"("classifier_pooling": "max")",
       R"("classifier_pooling" is "max", expected one of "cls", "mean")"},
      {"modern_bert", R"("local_attention": 6)", R"("local_attention": 0)", R"("local_attention" is 0)"},
      {"modern_bert", R"("layer_types": [)", R"("layer_types": ["full_attention",)", "for each of 3 layers"},
      {"modern_bert", R"("rope_type": "default")", R"("rope_type": "proportional")",
       R"(for "full_attention": "rope_parameters.rope_type" is "proportional")"},
      {"modern_bert", R"("layer_types": [)", R"("x": [)", ""},  // without the entry, every third layer is full
      {"bert_tokens", R"("id2label": {)", R"("id2label": {"9": "x",)",
       "shape mismatch: classifier.weight (expected [6, 8]"},
      // Sizes far above those of the files.
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": 16000000)", "parameters, but the tensors of the files have"},
      {"llama3", R"("num_hidden_layers": 2)", R"("num_hidden_layers": 4096)", "parameters, but the tensors"},
      {"llama3", R"("num_hidden_layers": 2)", R"("num_hidden_layers": 3)", "missing: model.layers.2.input_layernorm"},
      {"llama3", R"("vocab_size": 43)", R"("vocab_size": 44)",
       "shape mismatch: model.embed_tokens.weight (expected [44, 16]"},
  };
  for (const auto& c : cases) {
    copy_with(c.fixture, c.from, c.to);
    if (*c.message == '\0') {
      EXPECT_NO_THROW(io::load_pretrained(folder_)) << c.to;
    } else {
      expect_refused(c.message);
      expect_refused(folder_.string());
    }
  }
  copy_with("qwen2", R"("sliding_window": null)", R"("sliding_window": 8)");
  std::string config = read("config.json");
  const std::string off = R"("use_sliding_window": false)";
  write("config.json", config.replace(config.find(off), off.size(), R"("use_sliding_window": true)"));
  const auto loaded = [&] { return std::get<nn::LlamaConfig>(io::load_pretrained_config(folder_)); };
  EXPECT_EQ(loaded().window, 0);  // no layer has it
  const std::string full = R"("full_attention")";
  config.replace(config.rfind(full), full.size(), R"("sliding_attention")");
  write("config.json", config);
  const nn::LlamaConfig windowed = loaded();
  EXPECT_EQ(windowed.window, 8);
  EXPECT_EQ(windowed.windowed_layers, (std::vector<bool>{false, true}));
  config.replace(config.find(R"("sliding_window": 8,)"), 20, "");
  write("config.json", config);  // transformers takes 4096 then
  EXPECT_EQ(loaded().window, 4096);
  write("config.json", "3");
  expect_refused("expected an object of entries");
  write("config.json", "{} {}");
  expect_refused("not valid JSON");
  write("config.json", std::string(1 << 21, ' '));
  expect_refused("has 2097152 bytes, expected at most 1048576");
  fs::remove(folder_ / "config.json");
  expect_refused("config.json: No such file or directory");
  fs::create_directory(folder_ / "config.json");
  expect_refused("config.json is not a regular file");
  fs::remove(folder_ / "config.json");
  ASSERT_EQ(::mkfifo((folder_ / "config.json").c_str(), 0600), 0);
  expect_refused("config.json is not a regular file");
}

TEST_F(Pretrained, RefusesWeights) {
  copy("qwen2");
  fs::remove(folder_ / "model.safetensors");
  expect_refused("has neither model.safetensors nor model.safetensors.index.json");
  write("pytorch_model.bin", "x");
  expect_refused("pytorch_model.bin is not read");
  ASSERT_EQ(::mkfifo((folder_ / "model.safetensors").c_str(), 0600), 0);
  expect_refused("model.safetensors is not a regular file");

  fs::remove(folder_ / "model.safetensors");
  fs::create_symlink("nowhere", folder_ / "model.safetensors");
  expect_refused("model.safetensors: No such file or directory");
  fs::remove(folder_ / "model.safetensors");
  fs::create_symlink("model.safetensors", folder_ / "model.safetensors");
  expect_refused("model.safetensors: Too many levels of symbolic links");

  copy("qwen2");
  const std::string bytes = read("model.safetensors");
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{100}, bytes.size() - 1}) {
    write("model.safetensors", bytes.substr(0, size));
    expect_refused("model.safetensors is not a valid safetensors file");
  }
  write("model.safetensors", bytes);
  change_weights([](StateDict& state) {
    state.erase("model.norm.weight");
    state["model.layers.0.mlp.up_proj.weight"] = zeros({24, 17});
    state["extra"] = zeros({2});
  });
  expect_refused(
      "missing: model.norm.weight; unexpected: extra; shape mismatch: model.layers.0.mlp.up_proj.weight "
      "(expected [24, 16], got [24, 17])");
  expect_refused("shape mismatch", {.strict = false});

  // Phi 3's fused rows.
  const std::string name = "model.layers.1.self_attn.qkv_proj.weight";
  copy("phi3");
  change_weights([&](StateDict& state) { state[name] = slice(state.at(name), 0, 0, 31); });
  expect_refused("expected \"" + name + "\" to have 32 rows, got shape [31, 16]");
  copy("phi3");
  change_weights([&](StateDict& state) { state["model.layers.1.self_attn.v_proj.weight"] = zeros({8, 16}); });
  expect_refused("two tensors of the files have the name \"model.layers.1.self_attn.v_proj.weight\" in the model");
  copy("phi3");
  change_weights([&](StateDict& state) { state.erase(name); });
  expect_refused("missing: model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.k_proj.weight, model.");

  copy("qwen2");
  change_weights([](StateDict& state) {
    state["model.norm.weight"] = ones({16}, int64);
    state["lm_head.weight"] = state.at("model.embed_tokens.weight");  // ignored, since the head is tied
  });
  expect_refused("expected a floating dtype: model.norm.weight (int64)");

  // A head that is another tensor, although the configuration ties it.
  const std::string head = "but the files have another tensor \"lm_head.weight\"";
  for (const char* const fixture : {"qwen2", "gpt2"}) {
    const std::string embedding =
        fixture == std::string("gpt2") ? "transformer.wte.weight" : "model.embed_tokens.weight";
    for (const bool is_other : {false, true}) {
      copy(fixture);
      change_weights([&](StateDict& state) {
        Tensor weight = clone(state.at(embedding));
        weight.data<float>()[weight.numel() - 1] += is_other ? 1.0F : 0.0F;
        state["lm_head.weight"] = weight;
      });
      io::LoadDifferences differences;
      io::load_pretrained(folder_, {.strict = false, .differences = &differences});
      EXPECT_EQ(differences.unexpected, std::vector<std::string>(is_other ? 1 : 0, "lm_head.weight"));
      if (is_other) {
        expect_refused(head);
      } else {
        io::load_pretrained(folder_);
      }
    }
  }
  copy("qwen2");
  change_weights([](StateDict& state) { state["lm_head.weight"] = zeros({43, 16}, uint8); });
  expect_refused(head);

  copy("qwen2");
  change_weights([](StateDict& state) { state["final.weight"] = zeros({16}); });
  expect_refused("two tensors of the files have the name \"model.norm.weight\"",
                 {.renamings = {{"^final.", "model.norm."}}});
  expect_error([] { io::load_pretrained<nn::GPT>(kFixtures / "qwen2"); }, "has a model of another class");
  expect_error([] { io::load_pretrained(kFixtures / "qwen2", {.dtype = int32}); },
               "expected a floating dtype, got int32");
  expect_error([] { io::load_pretrained(kFixtures / "qwen2", {.renamings = {{"^", "x"}}}); }, "replaces nothing");
}

TEST_F(Pretrained, RefusesShards) {
  const auto with_index = [&](const std::string& from, const std::string& to, const std::string& message) {
    copy("llama3");
    std::string index = read("model.safetensors.index.json");
    const std::size_t at = index.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write("model.safetensors.index.json", index.replace(at, from.size(), to));
    expect_refused(message);
  };
  const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";
  with_index("weight_map", "map", "index.json: \"weight_map\" is missing or not an object");
  with_index("\"" + first + "\"", "1", "is not a text");
  with_index(first, "../" + first, "expected the name of a safetensors file in the same folder");
  with_index(first, "/etc/passwd", "expected the name of a safetensors file in the same folder");
  with_index(first, second, "has the tensor \"model.embed_tokens.weight\", which is not listed for it");
  with_index("\"lm_head.weight\"", "\"head.weight\"", "has the tensor \"lm_head.weight\", which is not listed for it");
  with_index("\"lm_head.weight\"", "\"more\": \"" + second + "\", \"lm_head.weight\"",
             "lacks the tensor \"more\", which is listed for it");
  with_index("\"lm_head.weight\"", "\"model.norm.weight\": \"" + first + "\", \"lm_head.weight\"", "appears twice");

  copy("llama3");
  StateDict shard = io::load(folder_ / second);
  shard["model.embed_tokens.weight"] = zeros({43, 16});  // the first has it too
  io::save(folder_ / second, shard);
  expect_refused("has the tensor \"model.embed_tokens.weight\", which is not listed for it");
  copy("llama3");
  fs::remove(folder_ / second);
  expect_refused(second + ": No such file or directory");
  copy("llama3");
  write("model.safetensors.index.json", std::string(1000, '{'));
  expect_refused("not valid JSON");
}

}  // namespace
