// Any bytes as the config.json and the index of a model: read, or refused by an Error.

#include <string_view>

#include "tests/fuzz/memory_file.h"
#include <mica/io/pretrained_config.h>

using namespace mica;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  io::JsonValue json;
  try {
    json = io::parse_json({reinterpret_cast<const char*>(data), size}, "input");
    // What was written is read as the same.
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
    fuzz::expect(io::parameter_count(config) > 0);  // no overflow
    // The configuration of the entries that are written for it is the same.
    const io::JsonValue again{io::config_entries(config)};
    fuzz::expect(io::parameter_count(io::pretrained_config(again, "again")) == io::parameter_count(config));
  } catch (const Error&) {
  }
  return 0;
}
