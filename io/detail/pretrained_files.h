#pragma once

// The files of a folder that transformers' from_pretrained() reads: config.json and the weights.

#include <cstdint>
#include <filesystem>
#include <string>

#include <mica/core/state_dict.h>
#include <mica/io/json.h>

namespace mica::io::detail {

inline constexpr const char* kPretrainedConfig = "config.json";

/// The config.json of the weights that the folder has.
std::filesystem::path config_file(const std::filesystem::path& folder);
JsonValue read_config(const std::filesystem::path& file);

/// All tensors of a folder's weights, mapped. Throws an Error that begins with "load_pretrained".
StateDict load_weights(const std::filesystem::path& folder);

/// Replaces config.json and the weights, in shards of at most `shard_bytes`: see save_pretrained().
void save_weights(const std::filesystem::path& folder, const std::string& config, const StateDict& tensors,
                  std::uint64_t shard_bytes);

}  // namespace mica::io::detail
