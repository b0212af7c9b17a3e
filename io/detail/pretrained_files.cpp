#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/detail/folder_save.h>
#include <mica/io/detail/pretrained_files.h>
#include <mica/io/file.h>
#include <mica/io/pretrained_config.h>
#include <mica/io/safetensors.h>

namespace mica::io::detail {

namespace {

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kShardIndex = "model.safetensors.index.json";
constexpr std::uint64_t kLongestConfig = std::uint64_t{1} << 20;
constexpr std::uint64_t kLongestIndex = std::uint64_t{16} << 20;

StateDict load_shards(const std::filesystem::path& folder) {
  const std::filesystem::path index = folder / kShardIndex;
  const std::string what = "load_pretrained: " + index.string();
  const std::map<std::string, std::string> files = weight_map(read_json(index, kLongestIndex), what);
  std::set<std::string> names;
  for (const auto& [tensor, file] : files) {
    names.insert(file);
  }
  StateDict result;
  for (const std::string& file : names) {
    for (auto& [name, tensor] : load_mapped(folder / file)) {
      const auto at = files.find(name);
      check(at != files.end() && at->second == file, "{}: {} has the tensor \"{}\", which is not listed for it", what,
            file, name);
      result.emplace(name, tensor);
    }
  }
  for (const auto& [tensor, file] : files) {
    check(result.contains(tensor), "{}: {} lacks the tensor \"{}\", which is listed for it", what, file, tensor);
  }
  return result;
}

void remove_quietly(const std::filesystem::path& path) { ::unlink(path.c_str()); }

/// The shards that a folder's index lists; none without an index that can be read.
std::set<std::string> shards_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  try {
    for (const auto& [tensor, file] : weight_map(read_json(folder / kShardIndex, kLongestIndex), "save_pretrained")) {
      names.insert(file);
    }
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error&) {
    return {};
  }
  return names;
}

bool is_shard(const std::string& name) {
  return name != kWeights && name.ends_with(".safetensors") && name.find('/') == std::string::npos;
}

/// Removes those of the files that the index does not list; none if the index cannot be read.
template <class Names>
void remove_unlisted(const std::filesystem::path& folder, const Names& names) {
  const std::set<std::string> listed = shards_in(folder);
  if (listed.empty() && is_there(folder / kShardIndex)) {
    return;
  }
  for (const std::string& name : names) {
    if (is_shard(name) && !listed.contains(name)) {
      remove_quietly(folder / name);
    }
  }
}

/// Names for `count` shards that no file in the folder has: model-00001-of-00003.safetensors or, after it,
/// model-2-00001-of-00003.safetensors.
std::vector<std::string> new_shard_names(const std::filesystem::path& folder, std::size_t count) {
  for (int attempt = 1;; ++attempt) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i) {
      names.push_back(fmt::format("model-{}{:05}-of-{:05}.safetensors", attempt == 1 ? "" : fmt::format("{}-", attempt),
                                  i + 1, count));
    }
    if (std::none_of(names.begin(), names.end(), [&](const std::string& name) { return is_there(folder / name); })) {
      return names;
    }
  }
}

std::vector<StateDict> shards_of(const StateDict& state, std::uint64_t shard_bytes) {
  std::vector<StateDict> shards(1);
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : state) {
    if (!shards.back().empty() && tensor.bytes() > shard_bytes - std::min(bytes, shard_bytes)) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().emplace(name, tensor);
    bytes += tensor.bytes();
  }
  return shards;
}

/// Writes the shards, then the index.
void write_shards(const std::filesystem::path& folder, const std::vector<StateDict>& shards,
                  const std::vector<std::string>& names, const std::string& config_checksum) {
  JsonValue::Object map;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    save(folder / names[i], shards[i], {{"format", "pt"}});  // transformers requires the format
    for (const auto& [name, tensor] : shards[i]) {
      map[name] = {names[i]};
      total += static_cast<std::int64_t>(tensor.bytes());
    }
  }
  const JsonValue::Object about{{"total_size", {total}}, {kDescriptionKey, {config_checksum}}};
  write_text(folder / kShardIndex, to_json({JsonValue::Object{{"metadata", {about}}, {"weight_map", {map}}}}));
}

/// Replaces the weights in one step: model.safetensors takes its place, or the index does and then model.safetensors,
/// which readers prefer to it, is removed. Shards get new names, so that the old index keeps its own until then.
void write_weights(const std::filesystem::path& folder, const StateDict& state, std::uint64_t shard_bytes,
                   const std::string& config_checksum, const FolderSave& saving) {
  remove_unfinished(folder,
                    [](const std::string& name) { return is_shard(name) || name == kWeights || name == kShardIndex; });
  remove_unlisted(folder, saving.noted());
  const std::set<std::string> old = shards_in(folder);
  const std::vector<StateDict> shards = shards_of(state, shard_bytes);
  saving.note({old.begin(), old.end()});
  if (shards.size() == 1) {
    save(folder / kWeights, state, {{"format", "pt"}, {kDescriptionKey, config_checksum}});
    remove_quietly(folder / kShardIndex);
  } else {
    const std::vector<std::string> names = new_shard_names(folder, shards.size());
    saving.note(names);
    try {
      write_shards(folder, shards, names, config_checksum);
    } catch (...) {
      remove_unlisted(folder, names);
      throw;
    }
    const std::filesystem::path file = folder / kWeights;
    check(::unlink(file.c_str()) == 0 || errno == ENOENT, "save_pretrained: cannot remove {}: {}", file.string(),
          error_text(errno));
  }
  remove_unlisted(folder, old);
}

/// The checksum of the config.json with which a folder's weights were saved.
std::string config_checksum_in(const std::filesystem::path& folder) {
  if (is_there(folder / kWeights)) {
    const Metadata metadata = load_metadata(folder / kWeights);
    const auto found = metadata.find(kDescriptionKey);
    return found == metadata.end() ? "" : found->second;
  }
  const JsonValue index = read_json(folder / kShardIndex, kLongestIndex);
  const JsonValue* const metadata = index.find("metadata");
  const JsonValue* const entry = metadata == nullptr ? nullptr : metadata->find(kDescriptionKey);
  const auto* const checksum = entry == nullptr ? nullptr : entry->as<std::string>();
  return checksum == nullptr ? "" : *checksum;
}

}  // namespace

std::filesystem::path config_file(const std::filesystem::path& folder) {
  return description_file(folder, kPretrainedConfig, config_checksum_in);
}

JsonValue read_config(const std::filesystem::path& file) { return read_json(file, kLongestConfig); }

StateDict load_weights(const std::filesystem::path& folder) {
  if (is_there(folder / kWeights)) {
    return load_mapped(folder / kWeights);
  }
  check(is_there(folder / kShardIndex), "load_pretrained: {} has neither {} nor {}{}", folder.string(), kWeights,
        kShardIndex,
        is_there(folder / "pytorch_model.bin")
            ? "; pytorch_model.bin is not read: let transformers save it again, which "
              "writes safetensors"
            : "");
  return load_shards(folder);
}

void save_weights(const std::filesystem::path& folder, const std::string& config, const StateDict& tensors,
                  std::uint64_t shard_bytes) {
  FolderSave saving("save_pretrained", folder, kPretrainedConfig, config_checksum_in, config);
  write_weights(folder, tensors, shard_bytes, description_checksum(config), saving);
  saving.finish();
}

}  // namespace mica::io::detail
