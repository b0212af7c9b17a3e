#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include <mica/core/check.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/pretrained_config.h>

namespace mica::io {

PretrainedConfig pretrained_config(const JsonValue& json, const std::string& what) {
  const detail::ConfigEntries entries(json, what);
  const std::string type = entries.text("model_type");
  check(!entries.has("quantization_config"),
        "{}: \"quantization_config\": mica reads no quantized checkpoints but GGUF files", what);
  check(!entries.has("per_layer_config"), "{}: \"per_layer_config\": mica's models have layers of one configuration",
        what);
  std::optional<PretrainedConfig> config;
  std::string types;
  detail::any_family([&](const auto& family) {
    for (const std::string_view name : family.types) {
      types += fmt::format("{}\"{}\"", types.empty() ? "" : ", ", name);
      if (name == type) {
        config = family.read(entries, type);
      }
    }
    return config.has_value();
  });
  if (!config) {
    entries.refuse("model_type", "one of " + types);
  }
  return *std::move(config);
}

JsonValue::Object config_entries(const PretrainedConfig& config) {
  return std::visit([](const auto& c) { return detail::family_of(c).write(c); }, config);
}

std::int64_t parameter_count(const PretrainedConfig& config) {
  return std::visit([](const auto& c) { return detail::family_of(c).parameter_count(c); }, config);
}

std::map<std::string, std::string> weight_map(const JsonValue& index, const std::string& what) {
  const JsonValue* const map = index.find("weight_map");
  check(map != nullptr && map->as<JsonValue::Object>() != nullptr, "{}: \"weight_map\" is missing or not an object",
        what);
  std::map<std::string, std::string> result;
  for (const auto& [tensor, value] : *map->as<JsonValue::Object>()) {
    const auto* const file = value.as<std::string>();
    check(file != nullptr, "{}: the file of \"{}\" is not a text", what, tensor);
    // A path could lead outside the folder.
    check(file->ends_with(".safetensors") && file->find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
          "{}: the file of \"{}\" is \"{}\", expected the name of a safetensors file in the same folder", what, tensor,
          *file);
    result.emplace(tensor, *file);
  }
  return result;
}

}  // namespace mica::io
