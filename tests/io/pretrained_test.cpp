#include <sys/stat.h>
#include <tests/folders.h>
#include <tests/support.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>

#include <mica/autograd/grad_mode.h>
#include <mica/core/memory_stats.h>
#include <mica/core/progress.h>
#include <mica/core/rng.h>
#include <mica/io/gguf.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>
#include <mica/nn/generate.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

namespace fs = std::filesystem;

const fs::path kFixtures = folder_from("MICA_PRETRAINED_FIXTURES", MICA_PRETRAINED_FIXTURES);

/// A separate, empty folder per test.
class Pretrained : public testing::Test {
 protected:
  Pretrained() {
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / ("mica_pretrained_" + std::string(test->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~Pretrained() override { fs::remove_all(folder_); }

  void copy(const std::string& fixture) const {
    fs::remove_all(folder_);
    fs::copy(kFixtures / fixture, folder_);
  }
  void write(const std::string& file, const std::string& bytes) const {
    std::ofstream(folder_ / file, std::ios::binary) << bytes;
  }
  std::string read(const std::string& file) const {
    std::ifstream in(folder_ / file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Copies a fixture and replaces a part of its config.json.
  void copy_with(const std::string& fixture, const std::string& from, const std::string& to) const {
    copy(fixture);
    std::string config = read("config.json");
    const std::size_t at = config.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write("config.json", config.replace(at, from.size(), to));
  }
  template <class F>
  void change_weights(const F& f) const {
    StateDict state = io::load(folder_ / "model.safetensors");
    f(state);
    io::save(folder_ / "model.safetensors", state);
  }
  void expect_refused(const std::string& message, const io::LoadOptions& options = {}) const {
    expect_error([&] { io::load_pretrained(folder_, options); }, message);
  }

  fs::path folder_;
};

double norm_of(const std::vector<double>& x) {
  double squares = 0;
  for (const double value : x) {
    squares += value * value;
  }
  return std::sqrt(squares);
}

// The relative error of `got`; `least` is the norm below which errors count as relative to it.
double relative_error(const Tensor& got, const Tensor& expected, double least) {
  EXPECT_EQ(got.shape(), expected.shape());
  std::vector<double> difference = to_vector<double>(got);
  const std::vector<double> right = to_vector<double>(expected);
  for (std::size_t i = 0; i < difference.size(); ++i) {
    difference[i] -= right[i];
  }
  return norm_of(difference) / std::max(norm_of(right), least);
}

struct Outputs {
  std::map<std::string, Tensor> results;
  Tensor loss;
};

Outputs run(const nn::Bert& bert, const StateDict& in) {
  const Tensor visible = in.at("visible");
  const Tensor features = bert(in.at("tokens"), visible, in.at("types"));
  const DType dtype = features.dtype();
  const Tensor seen = unsqueeze(visible, 2).to(dtype);
  Outputs out{.results = {{"features", features}}, .loss = sum(features * in.at("weights").to(dtype) * seen)};
  if (bert.pooler.has_value()) {
    out.results["pooled"] = bert.pooled(features);
    out.loss = out.loss + sum(out.results["pooled"] * in.at("pooled_weights").to(dtype));
  }
  return out;
}
template <class Model>
Outputs run(const Model& model, const StateDict& in) {
  return {.results = {{"logits", model(in.at("tokens"))}}, .loss = model.loss(in.at("tokens"), in.at("targets"))};
}

Tensor file_gradient(const nn::GPT&, const StateDict& expected, const std::string& prefix, const std::string& name) {
  const auto at = expected.find(prefix + "transformer." + name);
  const Tensor gradient = at != expected.end() ? at->second : expected.at(prefix + name);
  const bool is_linear = name.ends_with(".weight") && name.find(".c_") != std::string::npos;
  return is_linear ? transpose(gradient, 0, 1) : gradient;
}
template <class Model>
Tensor file_gradient(const Model&, const StateDict& expected, const std::string& prefix, const std::string& name) {
  return expected.at(prefix + name);
}

// Expects what PyTorch computed with the fixture: outputs, loss and every gradient.
void expect_matches(const io::PretrainedModel& any, const std::string& fixture, DType dtype) {
  const StateDict expected = io::load(kFixtures / fixture / "expected.safetensors");
  std::visit(
      [&](const auto& model) {
        const Device device = model.parameters().front().device();
        StateDict in;
        for (const auto& [name, tensor] : expected) {
          in.emplace(name, tensor.to(device));
        }
        const double tolerance = dtype == float32 ? 1e-4 : 2e-2;
        const std::string label = fmt::format("{}.", dtype);
        const Outputs out = run(model, in);
        for (const auto& [name, tensor] : out.results) {
          ASSERT_EQ(tensor.dtype(), dtype);
          EXPECT_LE(relative_error(tensor, expected.at(label + name), 0), tolerance) << fixture << ": " << name;
        }
        EXPECT_LE(relative_error(out.loss, expected.at(label + "loss"), 0), tolerance) << fixture;
        out.loss.backward();
        const std::string prefix = label + "grad.";
        double largest = 0;
        std::size_t gradients = 0;
        for (const auto& [name, tensor] : expected) {
          if (name.starts_with(prefix)) {
            ++gradients;
            largest = std::max(largest, norm_of(to_vector<double>(tensor)));
          }
        }
        // Small gradients, which are sums of large terms, count relative to a part of the largest. In the extreme,
        // softmax does not depend on a bias of all keys, whose gradient is nothing but rounding errors.
        const double least = largest * (dtype == float32 ? 1e-4 : 0.1);
        std::size_t compared = 0;
        for (const auto& [name, parameter] : model.named_parameters()) {
          if (name == "pooler.dense.weight" || name == "pooler.dense.bias" || parameter.grad().defined()) {
            ASSERT_TRUE(parameter.grad().defined()) << name;
            const Tensor theirs = file_gradient(model, expected, prefix, name);
            EXPECT_LE(relative_error(parameter.grad(), theirs, least), tolerance) << fixture << ": " << name;
            ++compared;
          }
        }
        EXPECT_EQ(compared, gradients) << fixture;
        EXPECT_EQ(compared, model.parameters().size()) << fixture;
      },
      any);
}

const std::vector<std::string> kModels{
    "gpt2", "gpt2_gelu_sharded", "gpt2_base",     "llama3", "llama_dynamic", "smollm", "mistral", "qwen2", "qwen3",
    "bert", "bert_tanh_sharded", "bert_no_pooler"};

TEST_F(Pretrained, GivesTheNumbersOfPyTorch) {
  for (const std::string& name : kModels) {
    for (const Device device : test_devices()) {
      expect_matches(io::load_pretrained(kFixtures / name, {.device = device}), name, float32);
      expect_matches(io::load_pretrained(kFixtures / name, {.device = device, .dtype = bfloat16}), name, bfloat16);
    }
  }
}

TEST_F(Pretrained, SavesWhatItLoads) {
  for (const std::string& name : kModels) {
    const io::PretrainedModel model = io::load_pretrained(kFixtures / name);
    for (const std::uint64_t shard_bytes : {std::uint64_t{5} << 30, std::uint64_t{9000}}) {
      fs::remove_all(folder_);
      io::save_pretrained(model, folder_, {.shard_bytes = shard_bytes});
      EXPECT_EQ(fs::exists(folder_ / "model.safetensors"), shard_bytes > 9000);
      EXPECT_EQ(fs::exists(folder_ / "model.safetensors.index.json"), shard_bytes == 9000);
      // The files have the tensors that transformers wrote, under the same names.
      const StateDict before = io::load_pretrained_tensors(kFixtures / name);
      const StateDict after = io::load_pretrained_tensors(folder_);
      ASSERT_EQ(after.size(), before.size()) << name;
      for (const auto& [key, tensor] : before) {
        const bool is_base = name == "gpt2_base";
        expect_close(after.at((is_base ? "transformer." : "") + key), tensor, 0, 0, name + ": " + key);
      }
      if (shard_bytes == 9000) {
        expect_matches(io::load_pretrained(folder_), name, float32);
      }
      if (const char* const keep = std::getenv("MICA_SAVED_MODELS")) {  // for tests/pretrained/check_saved.py
        const fs::path kept = fs::path(keep) / name / (shard_bytes == 9000 ? "shards" : "file");
        fs::create_directories(kept);
        fs::copy(folder_, kept, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
      }
    }
  }
}

TEST_F(Pretrained, SavesOverItself) {
  copy("llama3");
  nn::Llama model = io::load_pretrained<nn::Llama>(folder_);  // mapped
  {
    const autograd::NoGrad guard;
    model.lm_head.weight.data<float>()[0] = 7;  // a private page
  }
  io::save_pretrained(model, folder_, {.like = folder_});  // one file after two
  EXPECT_FALSE(fs::exists(folder_ / "model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(folder_ / "model-00001-of-00002.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "model-00002-of-00002.safetensors"));
  const nn::Llama again = io::load_pretrained<nn::Llama>(folder_);
  EXPECT_EQ(again.lm_head.weight.data<float>()[0], 7);
  expect_close(again.model.norm.weight, model.model.norm.weight, 0, 0);
  EXPECT_EQ(*io::read_json(folder_ / "config.json", 1 << 20).find("eos_token_id")->as<std::int64_t>(), 2);
  io::save_pretrained(again, folder_, {.shard_bytes = 9000});
  EXPECT_FALSE(fs::exists(folder_ / "model.safetensors"));
  EXPECT_TRUE(io::read_json(folder_ / "config.json", 1 << 20).find("eos_token_id")->is_null());
  const nn::Llama sharded = io::load_pretrained<nn::Llama>(folder_);  // mapped
  EXPECT_EQ(sharded.lm_head.weight.data<float>()[0], 7);

  // Other shards replace all of them, and no other file.
  write("model-00001-of-00099.safetensors", "not in the index");
  io::save_pretrained(sharded, folder_, {.shard_bytes = 4000});
  std::set<std::string> files, expected{"config.json", "model.safetensors.index.json", "expected.safetensors",
                                        "model-00001-of-00099.safetensors"};
  for (const auto& [name, file] :
       io::weight_map(io::read_json(folder_ / "model.safetensors.index.json", 1 << 20), "index")) {
    expected.insert(file);
  }
  for (const auto& entry : fs::directory_iterator(folder_)) {
    files.insert(entry.path().filename().string());
  }
  files.erase("generated.json");
  EXPECT_EQ(files, expected);
  EXPECT_EQ(io::load_pretrained<nn::Llama>(folder_).lm_head.weight.data<float>()[0], 7);
  write("model.safetensors.index.json", "{");  // then nothing is known of the shards
  io::save_pretrained(sharded, folder_);
  EXPECT_EQ(io::load_pretrained<nn::Llama>(folder_).lm_head.weight.data<float>()[0], 7);
}

/// A part of this process' memory that is a part of a file.
struct Mapping {
  std::uintptr_t begin, end;
  std::uint64_t offset;  // of its first byte in the file
  std::uint64_t inode;
};

std::vector<Mapping> mappings() {
  std::vector<Mapping> result;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    // begin-end permissions offset device inode path
    Mapping m{};
    std::string range, permissions, device;
    std::istringstream words(line);
    words >> range >> permissions >> std::hex >> m.offset >> device >> std::dec >> m.inode;
    const std::size_t dash = range.find('-');
    m.begin = std::stoull(range.substr(0, dash), nullptr, 16);
    m.end = std::stoull(range.substr(dash + 1), nullptr, 16);
    result.push_back(m);
  }
  return result;
}

TEST_F(Pretrained, ParametersLieInTheMappedFiles) {
  for (const std::string& name : kModels) {
    copy(name);
    std::map<std::uint64_t, std::string> files;  // by inode: their bytes
    for (const auto& entry : fs::directory_iterator(folder_)) {
      struct stat status {};
      ASSERT_EQ(::stat(entry.path().c_str(), &status), 0);
      if (entry.path().filename().string().starts_with("model") && entry.path().extension() == ".safetensors") {
        files.emplace(status.st_ino, read(entry.path().filename().string()));
      }
    }
    const io::PretrainedModel any = io::load_pretrained(folder_);
    const std::vector<Mapping> all = mappings();
    std::visit(
        [&](const auto& model) {
          for (const auto& [parameter_name, parameter] : model.named_parameters()) {
            const auto address = reinterpret_cast<std::uintptr_t>(parameter.raw_data());
            const std::size_t bytes = parameter.bytes();
            const auto at = std::find_if(all.begin(), all.end(), [&](const Mapping& m) {
              return m.begin <= address && address + bytes <= m.end && files.contains(m.inode);
            });
            // GPT-2's files have linear weights as (in, out): those are copied, transposed.
            const bool is_copied = name.starts_with("gpt2") && parameter.dim() == 2 && parameter_name.starts_with("h.");
            ASSERT_EQ(at == all.end(), is_copied) << name << ": " << parameter_name;
            if (!is_copied) {
              const std::string_view in_file =
                  std::string_view(files.at(at->inode)).substr(at->offset + (address - at->begin), bytes);
              EXPECT_TRUE(in_file == std::string_view(reinterpret_cast<const char*>(parameter.raw_data()), bytes))
                  << name << ": " << parameter_name;
            }
          }
        },
        any);
  }
}

TEST_F(Pretrained, LoadingTakesNoMemoryForTheParameters) {
  const nn::LlamaConfig config{.vocab = 4096, .layers = 2, .heads = 4, .key_heads = 2, .width = 64, .hidden = 128};
  io::save_pretrained(nn::Llama(config), folder_);
  const auto file = static_cast<std::size_t>(fs::file_size(folder_ / "model.safetensors"));
  ASSERT_GT(file, std::size_t{1} << 20);
  const std::size_t before = memory_stats(Device::cpu()).allocated;
  const nn::Llama mapped = io::load_pretrained<nn::Llama>(folder_);
  const std::size_t after = memory_stats(Device::cpu()).allocated;
  // Tables that the model computes, but not its weights.
  EXPECT_LT(after - before, file / 4);
  // What a copy takes is seen.
  const nn::Llama copied = io::load_pretrained<nn::Llama>(folder_, {.dtype = float64});
  EXPECT_GE(memory_stats(Device::cpu()).allocated - after, 2 * (file - file / 16));
}

TEST_F(Pretrained, TrainingLeavesTheMappedFileAlone) {
  copy("qwen3");
  const std::string bytes = read("model.safetensors");
  nn::Llama model = io::load_pretrained<nn::Llama>(folder_);
  EXPECT_TRUE(model.lm_head.weight.is_same(model.model.embed_tokens.weight));
  EXPECT_FALSE(model.is_training());
  // Training writes to private pages, and works.
  model.train();
  const Tensor tokens = randint(0, 43, {2, 5});
  const double before = model.loss(tokens, tokens).item();
  for (int i = 0; i < 5; ++i) {
    model.zero_grad();
    model.loss(tokens, tokens).backward();
    const autograd::NoGrad guard;
    for (const Tensor& parameter : model.parameters()) {
      const Tensor grad = parameter.grad();
      for (std::int64_t k = 0; k < parameter.numel(); ++k) {
        parameter.data<float>()[k] -= 0.02F * contiguous(grad).data<float>()[k];
      }
      parameter.bump_version();
    }
  }
  EXPECT_LT(model.loss(tokens, tokens).item(), before);
  EXPECT_EQ(read("model.safetensors"), bytes);
}

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
      {"llama3", R"("rope_type": "llama3")", R"("rope_type": "longrope")",
       R"("rope_parameters.rope_type" is "longrope")"},
      {"llama3", R"("factor": 4.0)", R"("factor": 0)", R"("rope_parameters.factor" is 0)"},
      {"llama3", R"("factor": 4.0,)", "", R"("rope_parameters.factor" is missing)"},
      {"llama3", R"("high_freq_factor": 4.0)", R"("high_freq_factor": 1.0)", "more than \"low_freq_factor\""},
      {"llama3", R"("rope_theta": 1000.0)", R"("rope_theta": 1)", "expected a number of at least"},
      {"qwen2", R"("rope_type": "yarn")", R"("rope_type": "yarn", "beta_fast": 0.5)", R"(at least "beta_slow")"},
      {"qwen2", R"("sliding_window": null)", R"("sliding_window": 8)", ""},  // not used: accepted
      {"gpt2", R"("n_head": 2)", R"("n_head": 3)", R"("n_head" is 3, expected a divisor of "n_embd", 16)"},
      {"gpt2", R"("n_inner": null)", R"("n_inner": 32)", R"("n_inner" is 32, expected four times)"},
      {"gpt2", R"("attn_pdrop": 0.1)", R"("attn_pdrop": 0.2)", R"(the same as "resid_pdrop")"},
      {"gpt2", R"("scale_attn_weights": true)", R"("scale_attn_weights": false)", "mica has no other"},
      {"gpt2", R"("activation_function": "gelu_new")", R"("activation_function": "relu")",
       R"(expected one of "gelu_new")"},
      {"bert", R"("hidden_act": "gelu")", R"("hidden_act": "silu")", R"("hidden_act" is "silu")"},
      {"bert", R"("is_decoder": false)", R"("is_decoder": true)", R"("is_decoder" is true)"},
      // Sizes that the files do not have.
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
  expect_refused("\"sliding_window\" is 8, expected null");
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

  copy("qwen2");
  change_weights([](StateDict& state) {
    state["model.norm.weight"] = ones({16}, int64);
    state["lm_head.weight"] = zeros({43, 16}, uint8);  // tied: passed over
  });
  expect_refused("expected a floating dtype: model.norm.weight (int64)");

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

TEST_F(Pretrained, PartsAndOtherNames) {
  copy("llama3");
  // A folder with one file, other names and no head.
  StateDict state;
  for (const auto& [name, tensor] : io::load_pretrained_tensors(folder_)) {
    if (name == "model.norm.weight") {
      state["backbone.final.scale"] = tensor;
    } else if (name != "lm_head.weight") {
      state["backbone." + name.substr(6)] = tensor;
    }
  }
  state["extra"] = zeros({1});
  io::save(folder_ / "model.safetensors", state);
  const std::vector<io::Renaming> renamings{{"^backbone.", "model."}, {"final.scale$", "norm.weight"}};
  expect_refused("missing: lm_head.weight; unexpected: extra", {.renamings = renamings});
  manual_seed(1);
  io::LoadDifferences differences;
  const auto model = std::get<nn::Llama>(
      io::load_pretrained(folder_, {.strict = false, .renamings = renamings, .differences = &differences}));
  EXPECT_EQ(differences.missing, std::vector<std::string>{"lm_head.weight"});
  EXPECT_EQ(differences.unexpected, std::vector<std::string>{"extra"});
  expect_close(model.model.norm.weight, state.at("backbone.final.scale"), 0, 0);
  // What is missing starts as in a new model.
  const double deviation = norm_of(to_vector<double>(model.lm_head.weight)) / std::sqrt(43.0 * 16);
  EXPECT_NEAR(deviation, 0.02, 0.004);

  // Models without their heads, inside of larger models, and with what old files have besides.
  copy("llama_dynamic");
  change_weights([](StateDict& state) {
    StateDict base;
    for (const auto& [name, tensor] : state) {
      base[name == "lm_head.weight" ? name : name.substr(6)] = tensor;
    }
    base["layers.0.self_attn.rotary_emb.inv_freq"] = zeros({3});
    state = base;
  });
  expect_matches(io::load_pretrained(folder_), "llama_dynamic", float32);
  copy("bert");
  change_weights([](StateDict& state) {
    StateDict larger;
    for (const auto& [name, tensor] : state) {
      std::string key = "bert." + name;
      if (const std::size_t at = key.find("LayerNorm."); at != std::string::npos) {
        key = key.substr(0, at + 10) + (key.ends_with("weight") ? "gamma" : "beta");
      }
      larger[key] = tensor;
    }
    larger["bert.embeddings.position_ids"] = zeros({1, 16}, int64);
    state = larger;
  });
  expect_matches(io::load_pretrained(folder_), "bert", float32);
  copy("gpt2");
  change_weights([](StateDict& state) {
    state["transformer.h.0.attn.bias"] = zeros({1, 1, 16, 16}, boolean);
    state["transformer.h.0.attn.masked_bias"] = zeros({});
    state["lm_head.weight"] = state.at("transformer.wte.weight");
  });
  expect_matches(io::load_pretrained(folder_), "gpt2", float32);
}

using Tokens = std::vector<std::int64_t>;

Tokens tokens_of(const io::JsonValue& text, const std::string& name) {
  Tokens tokens;
  for (const io::JsonValue& token : *text.find(name)->as<io::JsonValue::Array>()) {
    tokens.push_back(*token.as<std::int64_t>());
  }
  return tokens;
}

// The most likely tokens, with and without a repetition penalty, as transformers' generate() gives them for each
// prompt.
TEST_F(Pretrained, GeneratesAsTransformers) {
  for (const Device device : test_devices()) {
    for (const std::string& name : kModels) {
      if (name.starts_with("bert")) {
        continue;
      }
      SCOPED_TRACE(name);
      const io::JsonValue expected = io::read_json(kFixtures / name / "generated.json", 1 << 20);
      std::vector<Tokens> prompts, greedy, penalized;
      for (const io::JsonValue& text : *expected.find("texts")->as<io::JsonValue::Array>()) {
        prompts.push_back(tokens_of(text, "prompt"));
        greedy.push_back(tokens_of(text, "greedy"));
        penalized.push_back(tokens_of(text, "penalized"));
      }
      ASSERT_EQ(prompts.size(), 3U);
      io::PretrainedModel model = io::load_pretrained(kFixtures / name, {.device = device, .dtype = float32});
      const auto generate = [&](const std::vector<Tokens>& texts, double penalty) {
        const nn::GenerateOptions options{.count = static_cast<std::int64_t>(greedy[0].size()),
                                          .sampling = {.temperature = 0, .repetition_penalty = penalty}};
        return std::visit(
            [&]<class Model>(Model& m) {
              if constexpr (std::is_same_v<Model, nn::Bert>) {
                return std::vector<Tokens>{};
              } else {
                return nn::generate(m, texts, options);
              }
            },
            model);
      };
      const double penalty = *expected.find("penalty")->as<double>();
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        EXPECT_EQ(generate({prompts[i]}, 1)[0], greedy[i]) << i;
        EXPECT_EQ(generate({prompts[i]}, penalty)[0], penalized[i]) << i;
      }
      if (name == "llama_dynamic") {  // whose frequencies depend on the length
        expect_error([&] { generate(prompts, 1); }, "dynamic scaling takes no tensor of positions");
      } else {
        EXPECT_EQ(generate(prompts, 1), greedy);
        EXPECT_EQ(generate(prompts, penalty), penalized);
      }
    }
  }
}

TEST_F(Pretrained, ReportsProgress) {
  std::set<std::string> tasks;
  const ProgressObserver observer([&](const ProgressReport& report) {
    if (report.finished) {
      EXPECT_EQ(report.done, report.total) << report.task;
      tasks.insert(report.task);
    }
  });
  nn::Llama llama = io::load_pretrained<nn::Llama>(kFixtures / "llama3", {.dtype = bfloat16});
  nn::add_lora(llama, {"*q_proj"}, {.rank = 2});
  nn::merge_lora(llama);
  nn::generate(llama, {{1, 2, 3}}, {.count = 3});
  nn::quantize(llama, {.bits = 8, .group_size = 32});
  io::save(folder_ / "x.safetensors", llama.state_dict());
  io::load(folder_ / "x.safetensors");
  io::save_gguf(folder_ / "x.gguf", {{"weight", ones({2, 32})}});
  io::load_gguf(folder_ / "x.gguf");
  EXPECT_EQ(tasks, (std::set<std::string>{"loading the weights", "converting the model", "merging the adapters",
                                          "reading the prompt", "quantizing the model", "reading x.gguf",
                                          "reading x.safetensors", "writing x.gguf", "writing x.safetensors"}));
}

TEST_F(Pretrained, SavingErrors) {
  const nn::GPT without_bias({.vocab = 5, .context = 4, .layers = 1, .heads = 1, .width = 4, .bias = false});
  expect_error([&] { io::save_pretrained(without_bias, folder_); }, "no GPT-2 without biases");
  nn::LlamaConfig config{.vocab = 5, .context = 4, .layers = 1, .heads = 1, .key_heads = 1, .width = 4, .hidden = 4};
  config.output_bias = true;
  expect_error([&] { io::save_pretrained(nn::Llama(config), folder_); }, "no model with these biases");
  const nn::GPT gpt({.vocab = 5, .context = 4, .layers = 1, .heads = 1, .width = 4});
  expect_error([&] { io::save_pretrained(gpt, folder_, {.shard_bytes = 0}); }, "expected shard_bytes above 0");
  expect_error([&] { io::save_pretrained(gpt, folder_, {.like = folder_ / "none"}); }, "none/config.json");
  write("file", "x");
  expect_error([&] { io::save_pretrained(gpt, folder_ / "file"); }, "save_pretrained: cannot create the folder");
  EXPECT_FALSE(fs::exists(folder_ / "config.json"));
}

}  // namespace
