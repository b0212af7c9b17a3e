#include <mica/io/families/detail/layer_types.h>

namespace mica::io::detail {

std::vector<bool> read_layer_types(const ConfigEntries& entries, std::int64_t layers, bool allows_windows,
                                   const std::string& expected) {
  constexpr const char* kName = "layer_types";
  const auto* const types = entries.find(kName)->as<JsonValue::Array>();
  std::vector<bool> windowed;
  for (std::size_t i = 0; types != nullptr && i < types->size(); ++i) {
    const auto* const type = (*types)[i].as<std::string>();
    if (type == nullptr || (*type != kFullLayer && !(allows_windows && *type == kWindowedLayer))) {
      entries.refuse(kName, expected);
    }
    windowed.push_back(*type == kWindowedLayer);
  }
  if (types == nullptr || static_cast<std::int64_t>(windowed.size()) != layers) {
    entries.refuse(kName, expected);
  }
  return windowed;
}

JsonValue layer_types(const std::vector<bool>& windowed) {
  JsonValue::Array types;
  for (const bool has : windowed) {
    types.push_back({std::string(has ? kWindowedLayer : kFullLayer)});
  }
  return {types};
}

}  // namespace mica::io::detail
