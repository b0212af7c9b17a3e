// Reads any bytes as the config.json and as the index of a model: they must be read, or throw an Error.

#include <string_view>

#include "tests/fuzz/memory_file.h"
#include <mica/core/check.h>
#include <mica/io/pretrained_config.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  io::JsonValue json;
  try {
    json = io::parse_json({reinterpret_cast<const char*>(data), size}, "input");
    // Writing and reading gives the same value.
    const std::string text = io::to_json(json);
    fuzz::expect(io::to_json(io::parse_json(text, "text")) == text);
  } catch (const Error&) {
    return 0;
  }
  try {
    for (const auto& [tensor, file] : io::weight_map(json, "input")) {
      fuzz::expect(file.find('/') == std::string::npos && !file.empty());
    }
  } catch (const Error&) {
  }
  try {
    const io::PretrainedConfig config = io::pretrained_config(json, "input");
    fuzz::expect(io::parameter_count(config) > 0);  // does not overflow
    // The entries that are written for a configuration are read as the same configuration.
    const io::JsonValue again{io::config_entries(config)};
    fuzz::expect(io::parameter_count(io::pretrained_config(again, "again")) == io::parameter_count(config));
  } catch (const Error&) {
  }
  return 0;
}
