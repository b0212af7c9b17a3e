#include <fmt/format.h>

#include <array>
#include <string_view>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/families/detail/config_entries.h>
#include <mica/io/file.h>
#include <mica/io/json.h>
#include <mica/io/sentence_settings.h>

namespace mica::io {

namespace {

namespace fs = std::filesystem;

using detail::ConfigEntries;
using nn::Pooling;

constexpr std::uint64_t kLargestSettings = std::uint64_t{1} << 20;

constexpr std::array<std::pair<std::string_view, Pooling>, 6> kPoolings{{
    {"cls", Pooling::first},
    {"max", Pooling::max},
    {"mean", Pooling::mean},
    {"mean_sqrt_len_tokens", Pooling::mean_sqrt_length},
    {"weightedmean", Pooling::weighted_mean},
    {"lasttoken", Pooling::last},
}};

// The flags of version 5 and before, in the order in which their vectors are joined.
constexpr std::array<std::pair<const char*, Pooling>, 6> kPoolingFlags{{
    {"pooling_mode_cls_token", Pooling::first},
    {"pooling_mode_max_tokens", Pooling::max},
    {"pooling_mode_mean_tokens", Pooling::mean},
    {"pooling_mode_mean_sqrt_len_tokens", Pooling::mean_sqrt_length},
    {"pooling_mode_weightedmean_tokens", Pooling::weighted_mean},
    {"pooling_mode_lasttoken", Pooling::last},
}};

// Calls read(entries) with the file's entries, if it exists.
template <class Read>
void with_entries(const fs::path& file, const Read& read) {
  if (is_there(file)) {
    const JsonValue json = read_json(file, kLargestSettings);
    read(ConfigEntries(json, "load: " + file.string()));
  }
}

void read_pooling(const ConfigEntries& entries, SentenceSettings& settings) {
  entries.require_flag("include_prompt", true);
  settings.pooling.clear();
  if (const JsonValue* const modes = entries.find("pooling_mode")) {
    const JsonValue::Array one{*modes};
    const auto* const several = modes->as<JsonValue::Array>();
    for (const JsonValue& mode : several != nullptr ? *several : one) {
      const JsonValue as_entry{JsonValue::Object{{"pooling_mode", mode}}};
      settings.pooling.push_back(ConfigEntries(as_entry, entries.what()).choice("pooling_mode", "", kPoolings));
    }
  } else {
    for (const auto& [name, pooling] : kPoolingFlags) {
      if (entries.flag(name, false)) {
        settings.pooling.push_back(pooling);
      }
    }
  }
  if (settings.pooling.empty()) {
    settings.pooling.push_back(Pooling::mean);
  }
}

void read_modules(const fs::path& folder, SentenceSettings& settings) {
  const fs::path file = folder / "modules.json";
  const std::string what = "load: " + file.string();
  const JsonValue json = read_json(file, kLargestSettings);
  const auto* const modules = json.as<JsonValue::Array>();
  check(modules != nullptr, "{}: expected a list of modules", what);
  std::string names;
  for (const JsonValue& value : *modules) {
    const ConfigEntries module(value, what);
    const std::string type = module.text("type");
    const std::string name = type.substr(type.rfind('.') + 1);
    const std::string below = module.text("path", "");
    const fs::path path = below.empty() ? folder : folder / below;
    names += (names.empty() ? "" : ", ") + name;
    if (name == "Transformer") {
      settings.model = path;
    } else if (name == "Pooling") {
      with_entries(path / "config.json", [&](const ConfigEntries& entries) { read_pooling(entries, settings); });
    } else if (name == "Normalize") {
      settings.normalize = true;
    }
  }
  check(names == "Transformer, Pooling" || names == "Transformer, Pooling, Normalize",
        "{}: expected the modules Transformer, Pooling and perhaps Normalize, got {}", what,
        names.empty() ? "none" : names);
}

void read_prompts(const ConfigEntries& entries, SentenceSettings& settings) {
  check(!entries.has("truncate_dim"), "{}: \"truncate_dim\": mica does not shorten vectors", entries.what());
  if (const std::optional<ConfigEntries> prompts = entries.nested("prompts")) {
    for (const auto& [name, value] : *entries.find("prompts")->as<JsonValue::Object>()) {
      settings.prompts[name] = prompts->text(name, "");
    }
  }
  const std::string name = entries.text("default_prompt_name", "");
  if (!name.empty()) {
    check(settings.prompts.contains(name), "{}: \"default_prompt_name\" is \"{}\", which is not in \"prompts\"",
          entries.what(), name);
    settings.default_prompt = name;
  }
}

void read_length(const fs::path& folder, SentenceSettings& settings) {
  with_entries(folder / "tokenizer_config.json", [&](const ConfigEntries& entries) {
    const JsonValue* const length = entries.find("model_max_length");
    const auto* const number = length == nullptr ? nullptr : length->as<std::int64_t>();
    if (number != nullptr && *number >= 1 && *number < detail::kMostPositions) {  // 10^30 stands for no limit
      settings.max_length = *number;
    }
  });
  // The file is named after the class of the model that it was first written for.
  for (const char* const kind : {"bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"}) {
    const fs::path file = folder / fmt::format("sentence_{}_config.json", kind);
    if (is_there(file)) {
      with_entries(file, [&](const ConfigEntries& entries) {
        entries.require_flag("do_lower_case", false);
        if (entries.has("max_seq_length")) {
          settings.max_length = entries.count("max_seq_length", 1, detail::kMostPositions);
        }
      });
      return;
    }
  }
}

}  // namespace

SentenceSettings load_sentence_settings(const fs::path& folder) {
  SentenceSettings settings{.model = folder};
  if (is_there(folder / "modules.json")) {
    read_modules(folder, settings);
  }
  with_entries(folder / "config_sentence_transformers.json",
               [&](const ConfigEntries& entries) { read_prompts(entries, settings); });
  read_length(settings.model, settings);
  return settings;
}

}  // namespace mica::io
