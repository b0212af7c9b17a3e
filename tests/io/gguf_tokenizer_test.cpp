// Tokenizers in GGUF files, and models that are saved with one. tests/gguf/compare_llama_cpp.py compares the same files
// with llama.cpp.

#include <fmt/format.h>
#include <tests/files.h>
#include <tests/folders.h>
#include <tests/paths.h>
#include <tests/support.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/infer/generate.h>
#include <mica/io/gguf_tokenizer.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/tokenizer.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
using namespace mica::testing_support;

namespace gguf_tokenizer_test {

namespace fs = std::filesystem;
using Tokens = std::vector<std::int64_t>;
using Texts = std::vector<std::string>;
using Types = std::vector<std::int32_t>;

fs::path fixture(const std::string& name) {
  return fs::path(folder_from("MICA_TOKENIZER_FIXTURES", MICA_TOKENIZER_FIXTURES)) / name;
}

// Removes the flags that GGUF cannot express: tokens that absorb spaces, are single words, or are searched for in
// normalized text.
std::string without_flags(std::string json) {
  for (const std::string flag : {"lstrip", "rstrip", "single_word", "normalized"}) {
    const std::string set = "\"" + flag + "\":true";
    for (std::size_t at = json.find(set); at != std::string::npos; at = json.find(set)) {
      json.replace(at, set.size(), "\"" + flag + "\":false");
    }
  }
  return json;
}

constexpr const char* kConfig = R"({"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>", "pad_token": "<sep>",
                                    "chat_template": "<|im_start|>{{ message }}<|im_end|>"})";

io::Tokenizer without_flags_of(const std::string& name) {
  return io::Tokenizer::parse(without_flags(contents(fixture(name) / "tokenizer.json")), kConfig, name);
}

// The inputs of cases.json.
Texts inputs_of(const std::string& name) {
  Texts inputs;
  const io::JsonValue json = io::read_json(fixture(name) / "cases.json", 1 << 20);
  for (const io::JsonValue& entry : *json.as<io::JsonValue::Array>()) {
    const std::string& hex = *entry.find("bytes")->as<std::string>();
    inputs.emplace_back();
    for (std::size_t i = 0; i < hex.size(); i += 2) {
      inputs.back().push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
  }
  return inputs;
}

class GgufTokenizer : public testing::Test {
 protected:
  const TemporaryFolder own_;
  const fs::path path_ = own_.path() / "model.gguf";
};

TEST_F(GgufTokenizer, RoundTripsThroughAFile) {
  for (const std::string name : {"gpt2", "llama3", "qwen", "smollm"}) {
    SCOPED_TRACE(name);
    const io::Tokenizer before = without_flags_of(name);
    io::save_gguf(path_, {{"x", ones({1})}}, io::gguf_metadata(before, 616));
    ASSERT_TRUE(io::Tokenizer::is_in(path_));
    const io::Tokenizer after = io::Tokenizer::load(path_);
    const Texts inputs = inputs_of(name);
    ASSERT_GT(inputs.size(), 30u);
    for (const std::string& input : inputs) {
      const Tokens tokens = before.encode(input);
      EXPECT_EQ(after.encode(input), tokens) << input;
      EXPECT_EQ(after.decode(tokens), before.decode(tokens));
      const io::EncodeOptions as_text{.add_special_tokens = false, .parse_special_tokens = false};
      EXPECT_EQ(after.encode(input, as_text), before.encode(input, as_text)) << input;
    }
    EXPECT_EQ(after.special_tokens(), before.special_tokens());
    EXPECT_EQ(after.bos_token(), before.find("<|begin_of_text|>"));
    EXPECT_EQ(after.eos_token(), before.find("<|im_end|>"));
    EXPECT_EQ(after.pad_token(), before.find("<sep>"));
    EXPECT_EQ(after.chat_template(), before.chat_template());
    EXPECT_EQ(before.end_tokens(), Tokens{*before.eos_token()});
    EXPECT_EQ(after.end_tokens(), (Tokens{*after.eos_token(), *after.find("<|endoftext|>")}));
    // The model's other tokens exist, without text.
    ASSERT_EQ(before.vocabulary_size(), 610);
    ASSERT_EQ(after.vocabulary_size(), 616);
    EXPECT_EQ(after.find("[PAD615]"), 615);
    EXPECT_EQ(after.decode(Tokens{*after.find("a"), 615, *after.find("b")}), "ab");
    // Written again, it is the same.
    const io::GgufMetadata metadata = io::load_gguf_metadata(path_);
    EXPECT_EQ(io::gguf_metadata(after, 616), io::gguf_metadata(before, 616));
    for (const auto& [key, value] : io::gguf_metadata(after, 616)) {
      EXPECT_EQ(metadata.at(key), value) << key;
    }
  }
}

// Metadata as llama.cpp's conversion writes it.
io::GgufMetadata small() {
  return {{"tokenizer.ggml.model", std::string("gpt2")},
          {"tokenizer.ggml.pre", std::string("gpt-2")},
          {"tokenizer.ggml.tokens",
           Texts{"a", "b", "ab", "Ġ", "Ġab", "<|eot_id|>", "<think>", "[PAD7]", "漢", "<|endoftext|>"}},
          {"tokenizer.ggml.token_type", Types{1, 1, 1, 1, 1, 3, 4, 5, 1, 1}},
          {"tokenizer.ggml.merges", Texts{"a b", "Ġ ab"}},
          {"tokenizer.ggml.bos_token_id", std::uint32_t{3}},
          {"tokenizer.ggml.eos_token_id", std::uint32_t{1}}};
}

TEST_F(GgufTokenizer, ReadsTheKeys) {
  io::GgufMetadata metadata = small();
  io::Tokenizer tokenizer = io::gguf_tokenizer(metadata, "test");
  EXPECT_EQ(tokenizer.encode("ab abba<think><|eot_id|>"), (Tokens{2, 4, 1, 0, 6, 5}));
  EXPECT_EQ(tokenizer.decode(Tokens{4, 6, 7, 8}), " ab<think>漢");
  EXPECT_EQ(tokenizer.bos_token(), 3);
  EXPECT_EQ(tokenizer.eos_token(), 1);
  // The eos token, and the control token with a usual name. A normal token with such a name does not end a text.
  EXPECT_EQ(tokenizer.end_tokens(), (Tokens{1, 5}));
  EXPECT_EQ(io::gguf_end_tokens(metadata), tokenizer.end_tokens());
  metadata["tokenizer.ggml.eom_token_id"] = std::int32_t{6};
  metadata["tokenizer.ggml.eot_token_id"] = std::uint64_t{0};
  tokenizer = io::gguf_tokenizer(metadata, "test");
  EXPECT_EQ(tokenizer.end_tokens(), (Tokens{0, 1, 5, 6}));
  EXPECT_EQ(io::gguf_metadata(tokenizer, 10).at("tokenizer.ggml.eom_token_id"), io::GgufValue(std::uint32_t{6}));

  metadata["tokenizer.ggml.add_bos_token"] = true;
  metadata["tokenizer.ggml.add_eos_token"] = true;
  EXPECT_EQ(io::gguf_tokenizer(metadata, "test").encode("ab"), (Tokens{3, 2, 1}));
  // Llama 3's adds the first token if the file does not say.
  metadata.erase("tokenizer.ggml.add_bos_token");
  metadata["tokenizer.ggml.pre"] = std::string("llama-bpe");
  EXPECT_EQ(io::gguf_tokenizer(metadata, "test").encode("ab"), (Tokens{3, 2, 1}));
  metadata["tokenizer.ggml.add_bos_token"] = false;
  EXPECT_EQ(io::gguf_tokenizer(metadata, "test").encode("ab"), (Tokens{2, 1}));
  // Without types all are normal, and those without text have names.
  metadata = small();
  metadata.erase("tokenizer.ggml.token_type");
  std::get<Texts>(metadata.at("tokenizer.ggml.tokens"))[7] = "";
  tokenizer = io::gguf_tokenizer(metadata, "test");
  EXPECT_TRUE(tokenizer.special_tokens().empty());
  EXPECT_EQ(tokenizer.find("[EMPTY_7]"), 7);
  EXPECT_EQ(tokenizer.end_tokens(), Tokens{1});

  EXPECT_FALSE(io::has_gguf_tokenizer({}));
  EXPECT_FALSE(io::has_gguf_tokenizer({{"tokenizer.ggml.model", std::string("none")}}));
  EXPECT_TRUE(io::gguf_end_tokens({}).empty());
  // Also found for a tokenizer that is not supported.
  metadata["tokenizer.ggml.model"] = std::string("llama");
  EXPECT_EQ(io::gguf_end_tokens(metadata), Tokens{1});
}

TEST_F(GgufTokenizer, ReadErrors) {
  const auto refused = [&](const std::string& key, const std::optional<io::GgufValue>& value,
                           const std::string& message) {
    io::GgufMetadata metadata = small();
    metadata.erase(key);
    if (value) {
      metadata[key] = *value;
    }
    expect_error([&] { io::gguf_tokenizer(metadata, "test"); }, "test: " + message);
    // The same in a file.
    io::save_gguf(path_, {{"x", ones({1})}}, metadata);
    expect_error([&] { io::Tokenizer::load(path_); }, "load: " + path_.string() + ": " + message);
  };
  const std::string p = "tokenizer.ggml.";
  refused(p + "model", {}, "it has no tokenizer");
  refused(p + "model", "none", "it has no tokenizer");
  refused(p + "model", "llama", "the metadata lack \"tokenizer.ggml.scores\"");
  refused(p + "model", "bert", "the tokenizer is of the model \"bert\", WordPiece, which is not supported");
  refused(p + "model", "rwkv", "the tokenizer is of the model \"rwkv\", which is not supported");
  refused(p + "pre", {}, "the metadata lack \"tokenizer.ggml.pre\", which says how the tokenizer cuts a text");
  refused(p + "pre", "tekken", "the pre-tokenizer \"tekken\" is not supported, only gpt-2, smollm, llama-bpe, ");
  refused(p + "pre", 3U, "expected \"tokenizer.ggml.pre\" to be a text");
  refused(p + "tokens", {}, "the metadata lack \"tokenizer.ggml.tokens\"");
  refused(p + "tokens", Types{1}, "expected \"tokenizer.ggml.tokens\" to be a list of texts");
  refused(p + "tokens", Texts{"a"},
          "\"tokenizer.ggml.tokens\" has 1 tokens and \"tokenizer.ggml.token_type\" 10 types");
  refused(p + "tokens", Texts{"a", "b", "a", "3", "4", "5", "6", "7", "8", "9"}, "the token \"a\" appears twice");
  refused(p + "tokens", Texts{"a", "b", "ab", "3", "Ġ", "<|eot_id|>", "6", "<|eot_id|>", "8", "9"},
          "the token \"<|eot_id|>\" appears twice");
  refused(p + "tokens", Texts{"a", "b", "ab", "\xe6\xbc", "4", "5", "6", "7", "8", "9"},
          "a text in \"tokenizer.ggml.tokens\" is not UTF-8");
  refused(p + "tokens", Texts{"a", "b", "ab", "Ġ", "Ġab", std::string(5000, 'x'), "6", "7", "8", "9"},
          "the token \"xxx");
  refused(p + "token_type", Types{1, 1, 1, 1, 1, 3, 4, 5, 1},
          "\"tokenizer.ggml.tokens\" has 10 tokens and \"tokenizer.ggml.token_type\" 9 types");
  refused(p + "token_type", Types{1, 1, 6, 1, 1, 3, 4, 5, 1, 1}, "the type 6 of the token \"ab\" is not supported");
  refused(p + "token_type", std::vector<std::int64_t>{1},
          "expected \"tokenizer.ggml.token_type\" to be a list of numbers of type int32");
  refused(p + "merges", {}, "the metadata lack \"tokenizer.ggml.merges\"");
  refused(p + "merges", Texts{"a b", "a b"}, "the merge of \"a\" and \"b\" appears twice");
  refused(p + "merges", Texts{"a"}, "expected a merge of two tokens with a space between them, got \"a\"");
  refused(p + "merges", Texts{"a b b"}, "expected a merge of two tokens with a space between them");
  refused(p + "merges", Texts{"b a"},
          "the merge of \"b\" and \"a\" needs the token \"ba\", which the vocabulary lacks");
  refused(p + "merges", Texts{"\xff b"}, "a text in \"tokenizer.ggml.merges\" is not UTF-8");
  refused(p + "bos_token_id", 10U, "\"tokenizer.ggml.bos_token_id\" is 10, which is not one of the 10 tokens");
  refused(p + "eos_token_id", UINT32_MAX, "\"tokenizer.ggml.eos_token_id\" is 4294967295, which is not one of");
  refused(p + "eot_token_id", std::int32_t{-1}, "\"tokenizer.ggml.eot_token_id\" is -1, which is not one of");
  refused(p + "padding_token_id", 1.5F, "expected \"tokenizer.ggml.padding_token_id\" to be a whole number");
  refused(p + "add_bos_token", 1U, "expected \"tokenizer.ggml.add_bos_token\" to be a bool");
  refused("tokenizer.chat_template", "\xff", "a text in \"tokenizer.chat_template\" is not UTF-8");
  refused("tokenizer.chat_template", 1U, "expected \"tokenizer.chat_template\" to be a text");
  io::GgufMetadata metadata = small();
  metadata["tokenizer.ggml.add_bos_token"] = true;
  metadata.erase("tokenizer.ggml.bos_token_id");
  expect_error([&] { io::gguf_tokenizer(metadata, "test"); },
               "test: the metadata lack \"tokenizer.ggml.bos_token_id\"");
}

TEST_F(GgufTokenizer, WriteErrors) {
  const auto refused = [](const io::Tokenizer& tokenizer, std::int64_t size, const std::string& message) {
    expect_error([&] { io::gguf_metadata(tokenizer, size); }, "gguf_metadata: " + message);
  };
  refused(without_flags_of("gpt2"), 609, "the tokenizer has 610 tokens, but the model only 609");
  refused(without_flags_of("bert"), 640, "only tokenizers with byte-pair encoding of bytes are supported");
  refused(without_flags_of("roberta"), 640,
          "llama.cpp has no tokenizer that prepares a text as this one does: it adds");
  refused(io::Tokenizer::load(fixture("gpt2")), 640, "GGUF cannot express that the token \"");
  const auto with_template = [](const std::string& single) {
    std::string json = without_flags(contents(fixture("gpt2") / "tokenizer.json"));
    const std::string none = R"("post_processor":null)";
    EXPECT_NE(json.find(none), std::string::npos);
    json.replace(json.find(none), none.size(),
                 R"("post_processor":{"type":"TemplateProcessing","single":[)" + single +
                     R"(],"special_tokens":{"x":{"ids":[601]}}})");
    return io::Tokenizer::parse(json, kConfig, "test");
  };
  const std::string x = R"({"SpecialToken":{"id":"x"}})", text = R"({"Sequence":{"id":"A"}})";
  refused(with_template(x + "," + text), 640, "the tokenizer adds 1 tokens at the beginning of a text, and llama.cpp");
  refused(with_template(text + "," + x + "," + x), 640, "the tokenizer adds 2 tokens at the end of a text, and");
  // For a tokenizer that has only single letters, the missing tokens get names.
  const io::Tokenizer letters = io::Tokenizer::parse(
      R"({"model": {"type": "BPE", "merges": [], "vocab": {"a": 0, "[PAD1]": 3}},
          "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}})",
      "", "test");
  EXPECT_EQ(std::get<Texts>(io::gguf_metadata(letters, 4).at("tokenizer.ggml.tokens")),
            (Texts{"a", "[PAD1]_", "[PAD2]", "[PAD1]"}));
  EXPECT_EQ(std::get<Types>(io::gguf_metadata(letters, 4).at("tokenizer.ggml.token_type")), (Types{1, 5, 5, 1}));
}

// Models.

// Fills the parameters with numbers that make the logits differ widely.
template <class Model>
void randomize(Model& model) {
  const autograd::NoGrad no_grad;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const bool is_norm = parameter.dim() == 1 && name.find("bias") == std::string::npos;
    const bool is_embedding = name.find("emb") != std::string::npos || name.find("wte") != std::string::npos;
    const double scale = parameter.dim() == 1 ? 0.1 : is_embedding ? 0.5 : 0.2;
    parameter.set_data(randn(parameter.shape()) * scale + (is_norm ? 1.0 : 0.0));
  }
  model.eval();
}

io::JsonValue json_of(const Tokens& tokens) {
  io::JsonValue::Array list;
  for (const std::int64_t token : tokens) {
    list.push_back({token});
  }
  return {list};
}

constexpr const char* kPrompt = "The quick brown fox doesn't jump over 1234 lazy dogs; naïve café 漢字 😀\n\n  end";

// Saves the model with each type, and checks that the file has it and its tokenizer.
template <class Model>
void expect_saved(const std::string& name, Model& model, const std::string& tokenizer_name, const fs::path& folder) {
  SCOPED_TRACE(name);
  randomize(model);
  const io::Tokenizer tokenizer = without_flags_of(tokenizer_name);
  const Tokens prompt = tokenizer.encode(kPrompt);
  const Tensor input = from_data(prompt, {1, static_cast<std::int64_t>(prompt.size())});
  const infer::GenerateOptions greedy{.count = 24, .sampling = {.temperature = 0}};
  const auto logits_of = [&](const Model& m) {
    const autograd::NoGrad no_grad;
    return to_vector<double>(m(input));
  };
  const std::vector<double> expected = logits_of(model);
  using io::GgufType;
  // An error is the norm of the difference, relative to that of the logits.
  for (const auto& [type, most, suffix] : {std::tuple{GgufType::f32, 0.0, "f32"},
                                           {GgufType::f16, 0.01, "f16"},
                                           {GgufType::bf16, 0.05, "bf16"},
                                           {GgufType::q8_0, 0.1, "q8_0"},
                                           {GgufType::q4_0, 0.9, "q4_0"}}) {
    SCOPED_TRACE(suffix);
    const fs::path path = folder / fmt::format("{}.{}.gguf", name, suffix);
    io::save_gguf(path, model, tokenizer, {{"general.name", name}}, {.matrices = type, .vectors = GgufType::f32});
    for (const auto& [tensor, stored] : io::load_gguf_types(path)) {
      EXPECT_TRUE(stored == type || (stored == GgufType::f32 && tensor.find("token_embd") == std::string::npos));
    }
    EXPECT_EQ(std::get<std::string>(io::load_gguf_metadata(path).at("general.name")), name);
    EXPECT_EQ(io::Tokenizer::load(path).encode(kPrompt), prompt);
    Model loaded = io::load_pretrained<Model>(path, {.dtype = float32, .packed = false});
    const std::vector<double> logits = logits_of(loaded);
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      difference += (logits[i] - expected[i]) * (logits[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    EXPECT_LE(std::sqrt(difference / norm), most);
    EXPECT_EQ(difference > 0, type != GgufType::f32);
    // The rounded values, stored as float32.
    const fs::path values = folder / fmt::format("{}.{}_values.gguf", name, suffix);
    io::save_gguf(values, loaded, tokenizer);
    EXPECT_EQ(logits_of(io::load_pretrained<Model>(values)), logits);
    const Tokens generated = infer::generate(loaded, {prompt}, greedy)[0];
    if (type == GgufType::f32) {
      EXPECT_EQ(generated, infer::generate(model, {prompt}, greedy)[0]);
    }
    if (const char* const keep = std::getenv("MICA_SAVED_GGUF")) {  // for tests/gguf/compare_llama_cpp.py
      fs::create_directories(keep);
      for (const fs::path& file : {path, values}) {
        fs::copy(file, keep, fs::copy_options::overwrite_existing);
      }
      io::JsonValue::Array numbers;
      for (const double logit : logits) {
        numbers.push_back({logit});
      }
      std::ofstream(fs::path(keep) / path.stem().concat(".json"))
          << io::to_json({io::JsonValue::Object{{"prompt", {kPrompt}},
                                                {"tokens", json_of(prompt)},
                                                {"generated", json_of(generated)},
                                                {"logits", {numbers}}}});
    }
  }
}

TEST_F(GgufTokenizer, ModelsAreSavedWithIt) {
  manual_seed(11);
  const nn::RotaryConfig plain{.theta = 10000, .scaling = nn::RotaryScaling::none};
  const nn::LlamaConfig sizes{.vocab = 640,
                              .context = 128,
                              .layers = 2,
                              .heads = 4,
                              .key_heads = 2,
                              .width = 64,
                              .hidden = 96,
                              .rotary = plain,
                              .tied_head = false};
  nn::LlamaConfig config = sizes;
  nn::Llama llama(config);
  expect_saved("llama", llama, "llama3", own_.path());

  config = sizes;
  config.head_width = 32;
  config.rotary = {.theta = 500000,
                   .scaling = nn::RotaryScaling::llama3,
                   .factor = 8,
                   .original_context = 8192,
                   .low_frequency_factor = 1,
                   .high_frequency_factor = 4};
  config.tied_head = config.qkv_bias = config.output_bias = config.mlp_bias = true;
  nn::Llama scaled(config);
  expect_saved("llama_scaled", scaled, "smollm", own_.path());

  config = sizes;
  config.qkv_bias = config.tied_head = true;
  config.rotary = {.theta = 10000, .scaling = nn::RotaryScaling::yarn, .factor = 4, .original_context = 32};
  nn::Llama qwen2(config);
  expect_saved("qwen2", qwen2, "qwen", own_.path());

  config = sizes;
  config.qk_norm = true;
  config.head_width = 32;
  config.rotary = {.theta = 1000000, .scaling = nn::RotaryScaling::linear, .factor = 2};
  nn::Llama qwen3(config);
  expect_saved("qwen3", qwen3, "qwen", own_.path());

  nn::GPT gpt({.vocab = 640, .context = 128, .layers = 2, .heads = 4, .width = 64});
  expect_saved("gpt2", gpt, "gpt2", own_.path());

  EXPECT_EQ(std::get<std::string>(io::load_gguf_metadata(own_.path() / "gpt2.f32.gguf").at("general.architecture")),
            "gpt2");
  // Without a tokenizer.
  io::save_gguf(path_, gpt);
  EXPECT_FALSE(io::Tokenizer::is_in(path_));
  EXPECT_EQ(std::get<std::string>(io::load_gguf_metadata(path_).at("tokenizer.ggml.model")), "none");
  expect_error([&] { io::Tokenizer::load(path_); }, "it has no tokenizer");
}

TEST_F(GgufTokenizer, Gpt2sHeadIsTheEmbedding) {
  nn::GPT gpt({.vocab = 32, .context = 8, .layers = 1, .heads = 2, .width = 32});
  io::save_gguf(path_, gpt);
  StateDict tensors = io::load_gguf(path_);
  const io::GgufMetadata metadata = io::load_gguf_metadata(path_);
  // Older conversions store the head separately.
  tensors.emplace("output.weight", tensors.at("token_embd.weight"));
  io::save_gguf(path_, tensors, metadata);
  const nn::GPT read = io::load_pretrained<nn::GPT>(path_);
  expect_close(read.wte.weight, gpt.wte.weight, 0, 0);
  expect_close(read.h[0].attn.c_attn.weight, gpt.h[0].attn.c_attn.weight, 0, 0);
  tensors.at("output.weight") = ones({32, 32});
  io::save_gguf(path_, tensors, metadata);
  expect_error([&] { io::load_pretrained(path_); },
               "\"output.weight\" is not \"token_embd.weight\", which is the head");

  const nn::GPT exact(
      {.vocab = 32, .context = 8, .layers = 1, .heads = 2, .width = 32, .gelu = GeluApproximation::none});
  expect_error([&] { io::save_gguf(path_, exact); }, "llama.cpp's GPT-2 has biases and the tanh approximation of GELU");
  io::GgufMetadata wide = metadata;
  wide["gpt2.feed_forward_length"] = 64U;
  tensors.erase("output.weight");
  io::save_gguf(path_, tensors, wide);
  expect_error([&] { io::load_pretrained(path_); }, "n_inner");
}

}  // namespace gguf_tokenizer_test
