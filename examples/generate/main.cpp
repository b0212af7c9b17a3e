// Continues text with a model of train_transformer or a Hugging Face model, or answers a question with a chat model.

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "examples/common/character_model.h"
#include "examples/common/command_line.h"
#include "examples/common/ranks.h"
#include <mica/core/parallel.h>
#include <mica/io/adapter.h>
#include <mica/io/chat.h>
#include <mica/io/file.h>
#include <mica/io/gguf.h>
#include <mica/io/gguf_tokenizer.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/tokenizer.h>
#include <mica/nn/lora.h>
#include <mica/nn/quantized_linear.h>
#include <mica/train/progress_bar.h>

namespace {

namespace fs = std::filesystem;

using Tokens = std::vector<std::int64_t>;

struct Settings {
  fs::path model;      // --model
  fs::path tokenizer;  // a folder, or the model's own file
  std::optional<std::string> prompt, prompt_tokens, system;
  std::optional<std::string> adapter;  // folder
  bool chat = false;
  mica::Device device;
  std::string dtype;
  int quantize = 0;  // bits, or 0
  mica::infer::GenerateOptions options;
};

// "1,504,3575"
Tokens parsed_tokens(const std::string& text) {
  Tokens tokens;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    std::int64_t token = 0;
    const auto [after, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (after != end && *after != ',')) {
      throw UsageError("--prompt-tokens: expected integers separated by commas, got " + text);
    }
    tokens.push_back(token);
    if (after == end) {
      return tokens;
    }
    at = after + 1;
  }
}

bool is_gguf(const fs::path& path) { return path.extension() == ".gguf"; }

// The tokens that end a text: eos_token_id, a number or a list, of generation_config.json or config.json, or those of a
// GGUF file.
Tokens stop_tokens_of(const fs::path& folder) {
  if (is_gguf(folder)) {
    return mica::io::gguf_end_tokens(mica::io::load_gguf_metadata(folder));
  }
  for (const char* const name : {"generation_config.json", "config.json"}) {
    if (!mica::io::is_there(folder / name)) {
      continue;
    }
    const mica::io::JsonValue config = mica::io::read_json(folder / name, 1 << 20);
    const mica::io::JsonValue* const entry = config.find("eos_token_id");
    if (entry == nullptr || entry->is_null()) {
      continue;
    }
    Tokens tokens;
    if (const auto* const token = entry->as<std::int64_t>()) {
      tokens.push_back(*token);
    } else if (const auto* const list = entry->as<mica::io::JsonValue::Array>()) {
      for (const mica::io::JsonValue& element : *list) {
        if (const auto* const each = element.as<std::int64_t>()) {
          tokens.push_back(*each);
        }
      }
    }
    return tokens;
  }
  return {};
}

// Where the model's tokenizer is. If a GGUF file has none, it is in the file's folder.
fs::path tokenizer_of(const fs::path& model) {
  return is_gguf(model) && !mica::io::Tokenizer::is_in(model) ? model.parent_path() : model;
}

std::optional<mica::DType> dtype_named(const std::string& name) {
  if (name == "float32") {
    return mica::float32;
  }
  if (name == "bfloat16") {
    return mica::bfloat16;
  }
  if (name == "float16") {
    return mica::float16;
  }
  return std::nullopt;
}

// The tokens that a model continues, and how tokens are printed.
struct Prompt {
  Tokens tokens, stop_tokens;
  std::string shown;  // printed before the continuation
  std::function<std::string(std::int64_t)> text_of;
  std::function<std::string()> rest = [] { return std::string(); };
};

template <class Model>
void go_on(Model&, const Prompt&, const Settings&) {
  mica::fail("generate: the model is an encoder, which cannot generate text");
}

template <mica::infer::CachedModel Model>
void go_on(Model& model, const Prompt& prompt, const Settings& settings) {
  if (settings.adapter) {
    const auto layers = mica::nn::adapted_layers(model);
    const bool can_merge = std::none_of(layers.begin(), layers.end(), [](const mica::nn::AdaptedLayer& adapted) {
      return adapted.layer->is_quantized() || adapted.name == "lm_head";  // lm_head may be tied to the embedding
    });
    if (can_merge) {
      mica::nn::merge_lora(model);  // generates faster
    }
  }
  mica::infer::generate(model, {prompt.tokens}, settings.options);
}

// Writes text piece by piece. `before` is written only with the first piece, since the line may show a progress bar
// until then.
class Writer {
 public:
  explicit Writer(std::string before) : before_(std::move(before)) {}
  void operator()(std::string_view text) { put(std::exchange(before_, {}) + std::string(text)); }

 private:
  std::string before_;
};

Prompt prompt_of_tokens(const Settings& settings) {
  Prompt prompt;
  prompt.tokens = parsed_tokens(*settings.prompt_tokens);
  prompt.stop_tokens = stop_tokens_of(settings.tokenizer);
  prompt.text_of = [first = true](std::int64_t token) mutable {
    return (std::exchange(first, false) ? "" : " ") + std::to_string(token);
  };
  return prompt;
}

Prompt prompt_of_text(const Settings& settings) {
  const auto tokenizer = mica::io::Tokenizer::load(settings.tokenizer);
  Prompt prompt;
  prompt.stop_tokens = stop_tokens_of(settings.tokenizer);
  if (const auto end = tokenizer.eos_token()) {
    prompt.stop_tokens.push_back(*end);
  }
  if (settings.chat) {
    const mica::io::ChatFormat format(tokenizer);
    std::vector<mica::io::ChatMessage> messages{{"user", *settings.prompt}};
    if (settings.system) {
      messages.insert(messages.begin(), {"system", *settings.system});
    }
    prompt.tokens = format.encode(messages);
    prompt.stop_tokens.push_back(format.end_token());
  } else {
    prompt.tokens = tokenizer.encode(*settings.prompt);
    if (prompt.tokens.empty()) {
      throw UsageError("--prompt: expected some text");
    }
    prompt.shown = *settings.prompt;
  }
  const auto stream = std::make_shared<mica::io::StreamDecoder>(tokenizer);
  prompt.text_of = [stream](std::int64_t token) { return stream->push(token); };
  prompt.rest = [stream] { return stream->finish(); };
  return prompt;
}

void continue_with_pretrained(Settings& settings) {
  if (settings.prompt_tokens.has_value() == settings.prompt.has_value()) {
    throw UsageError("a Hugging Face model takes --prompt-tokens or --prompt");
  }
  if ((settings.chat || settings.system) && !(settings.chat && settings.prompt)) {
    throw UsageError("--chat takes --prompt, and --system takes --chat");
  }
  if (settings.prompt && !mica::io::Tokenizer::is_in(settings.tokenizer)) {
    throw UsageError("--prompt: " + settings.model.string() +
                     " has no tokenizer: a model without one takes --prompt-tokens");
  }
  const Prompt prompt = settings.prompt ? prompt_of_text(settings) : prompt_of_tokens(settings);
  mica::io::PretrainedModel model = mica::io::load_pretrained(
      settings.model,
      {.device = settings.device, .dtype = dtype_named(settings.dtype), .packed = settings.quantize == 0});
  if (settings.adapter) {
    mica::io::load_adapter(model, *settings.adapter);  // may compare the head with PEFT's, so before it is quantized
  }
  if (settings.quantize != 0) {
    std::visit([&](auto& m) { mica::nn::quantize(m, settings.quantize); }, model);
  }
  settings.options.stop_tokens = prompt.stop_tokens;
  Writer write(prompt.shown);
  settings.options.on_token = [&](std::size_t, std::int64_t token) {
    write(prompt.text_of(token));
    return true;
  };
  std::visit([&](auto& m) { go_on(m, prompt, settings); }, model);
  write(prompt.rest());
}

void write_text_of_own(const Settings& settings) {
  if (settings.prompt_tokens) {
    throw UsageError("--prompt-tokens is for Hugging Face models; use --prompt");
  }
  if (settings.chat || settings.system) {
    throw UsageError("--chat and --system are for Hugging Face models");
  }
  if (settings.adapter) {
    throw UsageError("--adapter is for Hugging Face models");
  }
  if (!settings.dtype.empty()) {
    throw UsageError("--dtype is for Hugging Face models");
  }
  CharacterModel model = load_character_model(settings.model / "model.safetensors", mica::Device::cpu());
  const std::string prompt = settings.prompt.value_or("");
  model.tokenizer.encode(prompt);  // reports a bad prompt before work that may be slow, and before anything is written
  model.gpt.to(settings.device);
  if (settings.quantize != 0) {
    mica::nn::quantize(model.gpt, settings.quantize);
  }
  Writer write(prompt);
  write_text(model, prompt, settings.options, std::ref(write));
  write("");
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line(
      "Continues text with a model of train_transformer or a Hugging Face model, or answers a question with a chat "
      "model.",
      "generate");
  Settings settings;
  std::string model, device = "auto";
  settings.options.count = 500;
  mica::infer::SamplingOptions& sampling = settings.options.sampling;
  sampling.temperature = 0.8;
  int threads = 0;
  command_line
      .add_option("--model", model, "Output folder of train_transformer, a folder with config.json, or a .gguf file")
      .required();
  command_line.add_option("--adapter", settings.adapter,
                          "Folder of an adapter for the model, written by finetune or PEFT");
  command_line.add_option("--prompt", settings.prompt,
                          "Text to continue (default for models of train_transformer: a newline)");
  command_line.add_flag("--chat", settings.chat, "Answer the prompt with a chat model");
  command_line.add_option("--system", settings.system, "System message of the chat (default: the model's)");
  command_line.add_option(
      "--prompt-tokens", settings.prompt_tokens,
      "Token ids to continue, such as 1,504,3575, for a Hugging Face model; stops at its end token");
  command_line.add_option("--tokens", settings.options.count, "Maximum number of characters or tokens to generate")
      .at_least(0)
      .show_default();
  command_line
      .add_option("--temperature", sampling.temperature,
                  "0: always choose the most likely token; 1: sample from the model's distribution")
      .at_least(0)
      .show_default();
  command_line.add_option("--top-k", sampling.top_k, "Sample from the k most likely tokens only; 0: all")
      .at_least(0)
      .show_default();
  command_line
      .add_option("--top-p", sampling.top_p, "Sample from the most likely tokens whose probabilities add up to this")
      .between(1e-9, 1)
      .show_default();
  command_line
      .add_option("--repetition-penalty", sampling.repetition_penalty,
                  "Above 1: make tokens that are already in the text less likely")
      .positive()
      .show_default();
  command_line.add_option("--seed", sampling.seed, "Random seed").between(0, 1e18).show_default();
  command_line.add_option("--device", device, "auto, cpu or cuda").one_of({"auto", "cpu", "cuda"}).show_default();
  command_line
      .add_option("--dtype", settings.dtype,
                  "float32, bfloat16 or float16 for a Hugging Face model (default: as in its files)")
      .one_of({"float32", "bfloat16", "float16"});
  command_line
      .add_option("--window", settings.options.window,
                  "Number of tokens that each token attends to, including itself, which bounds the memory for long "
                  "texts; 0: all")
      .at_least(0);
  command_line
      .add_option("--quantize", settings.quantize,
                  "Quantize the linear layers' weights to 8, 4, 2 or 1 bits when loading")
      .between(1, 8);
  command_line.add_option("--threads", threads, "CPU threads; 0 uses every core").between(0, 1024);

  return command_line.run(argc, argv, [&] {
    refuse_ranks("generate");
    for (const int bits : {3, 5, 6, 7}) {
      if (settings.quantize == bits) {
        throw UsageError("--quantize: expected 8, 4, 2 or 1, got " + std::to_string(bits));
      }
    }
    const mica::train::ProgressBar progress;
    if (threads > 0) {
      mica::set_num_threads(threads);
    }
    settings.model = model;
    settings.tokenizer = tokenizer_of(settings.model);
    settings.device = device_named(device);
    if (!is_gguf(settings.model)) {
      mica::io::check_folder(settings.model, "load");
    }
    if (is_gguf(settings.model) || mica::io::is_there(settings.model / "config.json")) {
      continue_with_pretrained(settings);
    } else {
      write_text_of_own(settings);
    }
    put("\n");
  });
}
