#include "examples/common/character_model.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>

using namespace mica;

namespace {

const std::string& entry(const io::Metadata& metadata, const char* name) {
  const auto found = metadata.find(name);
  check(found != metadata.end(), "its metadata lacks \"{}\"", name);
  return found->second;
}

std::int64_t count(const io::Metadata& metadata, const char* name) {
  const std::string& text = entry(metadata, name);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= 1 << 20, "its {} is \"{}\"",
        name, text);
  return value;
}

// Prevents a damaged configuration from allocating more memory than the file's tensors need.
void check_size(const nn::GPTConfig& config, const StateDict& state) {
  std::int64_t elements = 0;
  for (const auto& [name, tensor] : state) {
    elements += tensor.numel();
  }
  const std::int64_t rows = config.vocab + config.context + config.layers * config.width;
  check(rows <= elements / config.width, "its configuration does not fit its tensors");
}

}  // namespace

io::Metadata metadata_of(const nn::GPTConfig& config) {
  return {{"context", std::to_string(config.context)},
          {"layers", std::to_string(config.layers)},
          {"heads", std::to_string(config.heads)},
          {"width", std::to_string(config.width)},
          {"bias", config.bias ? "yes" : "no"}};
}

void save(const nn::GPT& gpt, const io::CharTokenizer& tokenizer, const std::filesystem::path& path) {
  io::Metadata metadata = metadata_of(gpt.config);
  metadata["alphabet"] = tokenizer.alphabet();
  io::save(path, gpt.state_dict(), metadata);
}

CharacterModel load_character_model(const std::filesystem::path& path, Device device) {
  const io::Metadata metadata = io::load_metadata(path);
  const StateDict state = io::load(path);
  try {
    io::CharTokenizer tokenizer(entry(metadata, "alphabet"));
    const auto bias = metadata.find("bias");  // older files lack this entry, and their models have no biases
    const nn::GPTConfig config{.vocab = tokenizer.size(),
                               .context = count(metadata, "context"),
                               .layers = count(metadata, "layers"),
                               .heads = count(metadata, "heads"),
                               .width = count(metadata, "width"),
                               .bias = bias != metadata.end() && bias->second == "yes"};
    check_size(config, state);
    CharacterModel model{std::move(tokenizer), nn::GPT(config)};
    model.gpt.load_state_dict(state);
    model.gpt.to(device);
    return model;
  } catch (const Error& error) {
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
