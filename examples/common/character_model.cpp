#include "examples/common/character_model.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <mica/mica.h>

using namespace mica;

namespace {

nn::GPTConfig config_of(const std::string& text, std::int64_t vocab) {
  const auto json = nlohmann::json::parse(text);
  const auto count = [&](const char* name) {
    const auto value = json.at(name).get<std::int64_t>();
    check(value >= 1 && value <= 1 << 20, "its {} is {}", name, value);
    return value;
  };
  nn::GPTConfig config;
  config.vocab = vocab;
  config.context = count("context");
  config.layers = count("layers");
  config.heads = count("heads");
  config.width = count("width");
  config.dropout = json.at("dropout").get<double>();
  config.bias = json.at("bias").get<bool>();
  return config;
}

// A damaged configuration shall not ask for more memory than the file's tensors take.
void check_size(const nn::GPTConfig& config, const StateDict& state) {
  std::int64_t elements = 0;
  for (const auto& [name, tensor] : state) {
    elements += tensor.numel();
  }
  const std::int64_t rows = config.vocab + config.context + config.layers * config.width;
  check(rows <= elements / config.width, "its configuration does not fit its tensors");
}

}  // namespace

void save(const CharacterModel& model, const std::filesystem::path& path) {
  const nn::GPTConfig& config = model.gpt.config;
  const nlohmann::ordered_json json{{"context", config.context}, {"layers", config.layers},   {"heads", config.heads},
                                    {"width", config.width},     {"dropout", config.dropout}, {"bias", config.bias}};
  io::save(path, model.gpt.state_dict(), {{"config", json.dump()}, {"alphabet", model.tokenizer.alphabet()}});
}

CharacterModel load_character_model(const std::filesystem::path& path, Device device) {
  const io::Metadata metadata = io::load_metadata(path);
  const StateDict state = io::load(path);
  const auto alphabet = metadata.find("alphabet");
  const auto config = metadata.find("config");
  check(alphabet != metadata.end() && config != metadata.end(),
        "{} is not a model of train_transformer: it has no alphabet or no config", path.string());
  try {
    io::CharTokenizer tokenizer(alphabet->second);
    const nn::GPTConfig shape = config_of(config->second, tokenizer.size());
    check_size(shape, state);
    CharacterModel model{std::move(tokenizer), nn::GPT(shape)};
    model.gpt.load_state_dict(state);
    model.gpt.to(device);
    return model;
  } catch (const std::exception& error) {
    fail("{} is not a model of train_transformer: {}", path.string(), error.what());
  }
}

void write_text(CharacterModel& model, std::string_view prompt, std::int64_t count, const nn::SamplingOptions& sampling,
                const std::function<void(std::string_view)>& write) {
  const autograd::NoGrad guard;
  model.gpt.eval();
  const Device device = model.gpt.wte.weight.device();
  std::vector<std::int32_t> tokens = model.tokenizer.encode(prompt);
  if (tokens.empty()) {
    const bool has_lines = model.tokenizer.alphabet().find('\n') != std::string::npos;
    tokens = has_lines ? model.tokenizer.encode("\n") : std::vector<std::int32_t>{0};
  }
  nn::Sampler sampler(sampling);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto length = std::min(model.gpt.config.context, static_cast<std::int64_t>(tokens.size()));
    const std::vector<std::int64_t> window(tokens.end() - length, tokens.end());
    const Tensor logits = model.gpt.next_token_logits(from_data(window, {1, length}, device));
    tokens.push_back(static_cast<std::int32_t>(sampler(logits).front()));
    write(model.tokenizer.decode(std::span(tokens).last(1)));
  }
}
