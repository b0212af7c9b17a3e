#include "examples/common/character_model.h"

#include <array>
#include <charconv>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

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

void save(const nn::GPT& gpt, const std::optional<io::CharTokenizer>& tokenizer, const std::filesystem::path& path) {
  io::Metadata metadata{{"context", std::to_string(gpt.config.context)},
                        {"layers", std::to_string(gpt.config.layers)},
                        {"heads", std::to_string(gpt.config.heads)},
                        {"width", std::to_string(gpt.config.width)},
                        {"bias", gpt.config.bias ? "yes" : "no"}};
  if (tokenizer) {
    metadata["alphabet"] = tokenizer->alphabet();  // its length is the vocabulary
  } else {
    metadata["vocab"] = std::to_string(gpt.config.vocab);
  }
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

void write_text(CharacterModel& model, std::string_view prompt, infer::GenerateOptions options,
                const std::function<void(std::string_view)>& write) {
  std::vector<std::int32_t> tokens = model.tokenizer.encode(prompt);
  if (tokens.empty()) {
    const bool has_lines = model.tokenizer.alphabet().find('\n') != std::string::npos;
    tokens = has_lines ? model.tokenizer.encode("\n") : std::vector<std::int32_t>{0};
  }
  options.on_token = [&](std::size_t, std::int64_t token) {
    write(model.tokenizer.decode(std::array{static_cast<std::int32_t>(token)}));
    return true;
  };
  infer::generate(model.gpt, {std::vector<std::int64_t>(tokens.begin(), tokens.end())}, options);
}
