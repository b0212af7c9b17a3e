#pragma once

// The entry "layer_types" of config.json: which layers attend in a window.

#include <cstdint>
#include <string>
#include <vector>

#include <mica/io/families/detail/config_entries.h>
#include <mica/io/json.h>

namespace mica::io::detail {

inline constexpr const char* kWindowedLayer = "sliding_attention";
inline constexpr const char* kFullLayer = "full_attention";

/// Whether each of `layers` layers has the window. Throws, with `expected` in the message, if there are more or fewer
/// entries, if one is unknown, or if one has the window although `allows_windows` is false.
std::vector<bool> read_layer_types(const ConfigEntries& entries, std::int64_t layers, bool allows_windows,
                                   const std::string& expected);

JsonValue layer_types(const std::vector<bool>& windowed);

}  // namespace mica::io::detail
