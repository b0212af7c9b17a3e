#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include <mica/core/check.h>
#include <mica/core/copy.h>
#include <mica/io/detail/folder_save.h>
#include <mica/io/detail/gguf_header.h>
#include <mica/io/detail/gguf_model.h>
#include <mica/io/file.h>
#include <mica/io/gguf_tokenizer.h>
#include <mica/io/json.h>
#include <mica/io/pretrained.h>
#include <mica/io/safetensors.h>
#include <mica/nn/init.h>
#include <mica/ops/view/view.h>

namespace mica::io {

namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kShardIndex = "model.safetensors.index.json";
constexpr std::uint64_t kLongestConfig = std::uint64_t{1} << 20;
constexpr std::uint64_t kLongestIndex = std::uint64_t{16} << 20;

template <class... Parts>
bool ends_with_any(std::string_view name, const Parts&... parts) {
  return (name.ends_with(parts) || ...);
}

// Names.

std::string renamed(std::string name, const std::vector<Renaming>& renamings) {
  for (const Renaming& rule : renamings) {
    std::string_view from = rule.from;
    const bool at_begin = from.starts_with('^');
    from.remove_prefix(at_begin ? 1 : 0);
    const bool at_end = from.ends_with('$');
    from.remove_suffix(at_end ? 1 : 0);
    check(!from.empty(), "load_pretrained: the renaming \"{}\" to \"{}\" replaces nothing", rule.from, rule.to);
    const std::size_t at = at_end && name.ends_with(from) ? name.size() - from.size() : name.find(from);
    const bool fits = at != std::string::npos && (!at_begin || at == 0) && (!at_end || at + from.size() == name.size());
    if (fits) {
      name.replace(at, from.size(), rule.to);
    }
  }
  return name;
}

/// The differences between a family's files and its state_dict().
struct Layout {
  std::string_view prefix;        // of the names in a larger model's files; removed
  std::string_view own_prefix{};  // of the names here; added if no name in the files has it
  std::string_view embedding{};   // the parameter to which a head may be tied
  bool transposed = false;        // linear weights are stored as (in, out)
};

Layout layout_of(const nn::GPTConfig&) {
  return {.prefix = "transformer.", .embedding = "wte.weight", .transposed = true};
}
Layout layout_of(const nn::LlamaConfig&) {
  return {.prefix = "", .own_prefix = "model.", .embedding = "model.embed_tokens.weight"};
}
Layout layout_of(const nn::BertConfig&) { return {.prefix = "bert."}; }

// Buffers in old files that models now compute themselves.
bool is_obsolete(std::string_view name) {
  return ends_with_any(name, ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "embeddings.position_ids");
}

bool is_transposed(const Layout& layout, std::string_view name, const Tensor& tensor) {
  return layout.transposed && tensor.dim() == 2 &&
         ends_with_any(name, ".c_attn.weight", ".c_proj.weight", ".c_fc.weight");
}

constexpr std::string_view kHeadWeight = "lm_head.weight";

std::string own_name(const Layout& layout, bool lacks_prefix, std::string name) {
  if (!layout.prefix.empty() && name.starts_with(layout.prefix)) {
    name.erase(0, layout.prefix.size());
  }
  if (lacks_prefix && name != kHeadWeight) {
    name.insert(0, layout.own_prefix);
  }
  // The first BERT files were converted from TensorFlow, with its names.
  for (const auto& [from, to] : {std::pair<std::string_view, std::string_view>{".LayerNorm.gamma", ".LayerNorm.weight"},
                                 {".LayerNorm.beta", ".LayerNorm.bias"}}) {
    if (name.ends_with(from)) {
      name.replace(name.size() - from.size(), from.size(), to);
    }
  }
  return name;
}

bool is_same(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(contiguous_data(a).raw_data(), contiguous_data(b).raw_data(), a.bytes()) == 0;
}

StateDict own_state(const Layout& layout, bool tied_head, const StateDict& files, const LoadOptions& options,
                    const std::string& what) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  bool lacks_prefix = true;
  for (const auto& [file_name, tensor] : files) {
    tensors.emplace_back(renamed(file_name, options.renamings), tensor);
    lacks_prefix = lacks_prefix && !tensors.back().first.starts_with(layout.own_prefix);
  }
  StateDict result;
  Tensor head;
  for (const auto& [file_name, tensor] : tensors) {
    const std::string name = own_name(layout, lacks_prefix, file_name);
    if (tied_head && name == kHeadWeight) {
      head = tensor;
    }
    if (is_obsolete(name) || (tied_head && name == kHeadWeight)) {
      continue;
    }
    // A transposed view: load_state_dict copies tensors that are not contiguous.
    const Tensor value = is_transposed(layout, name, tensor) ? transpose(tensor, 0, 1) : tensor;
    check(result.emplace(name, value).second, "{}: two tensors of the files have the name \"{}\" in the model", what,
          name);
  }
  if (!head.defined()) {
    return result;
  }
  const auto [embedding, is_new] = result.try_emplace(std::string(layout.embedding), head);
  // Of two tied tensors, safetensors' save_model() writes one, which may be the head. transformers does not tie
  // different ones, whatever the configuration says.
  if (!is_new && !is_same(head, embedding->second)) {
    check(!options.strict,
          "{}: \"tie_word_embeddings\" says that the head is the embedding, but the files have another tensor \"{}\"",
          what, kHeadWeight);
    if (options.differences != nullptr) {
      options.differences->unexpected.emplace_back(kHeadWeight);
    }
  }
  return result;
}

// Models.

template <class Config>
struct ModelOf;
template <>
struct ModelOf<nn::GPTConfig> {
  using Type = nn::GPT;
};
template <>
struct ModelOf<nn::LlamaConfig> {
  using Type = nn::Llama;
};
template <>
struct ModelOf<nn::BertConfig> {
  using Type = nn::Bert;
};

bool has_tied_head(const nn::GPTConfig&) { return true; }
bool has_tied_head(const nn::LlamaConfig& c) { return c.tied_head; }
bool has_tied_head(const nn::BertConfig&) { return false; }

void adapt(nn::BertConfig& config, const StateDict& state) {
  config.pooler = state.contains("pooler.dense.weight") || state.contains("pooler.dense.bias");
}
template <class Config>
void adapt(Config&, const StateDict&) {}

// Limits the memory that a damaged configuration can make us allocate. With strict = false, parameters may be missing,
// so the model may have up to 16 times the elements of the files.
void check_size(const PretrainedConfig& config, const StateDict& state, bool strict, const std::string& what) {
  std::int64_t elements = 0;
  for (const auto& [name, tensor] : state) {
    elements += tensor.numel();
  }
  constexpr std::int64_t kSlack = 1 << 20;
  const std::int64_t most = strict ? elements : elements / 4 > INT64_MAX / 64 ? INT64_MAX : 16 * elements;
  const std::int64_t expected = parameter_count(config);
  check(expected <= std::max(most, kSlack),
        "{}: the model of {} has {} parameters, but the tensors of the files have {} elements", what, kConfig, expected,
        elements);
}

template <class Config>
PretrainedModel build(Config config, const StateDict& files, const LoadOptions& options, const std::string& what) {
  if (options.differences != nullptr) {
    *options.differences = {};
  }
  const StateDict state = own_state(layout_of(config), has_tied_head(config), files, options, what);
  adapt(config, state);
  check_size(config, state, options.strict, what);
  // With strict, every parameter is loaded, so initializing them would be wasted work.
  std::optional<nn::init::Skip> skip;
  if (options.strict) {
    skip.emplace();
  }
  typename ModelOf<Config>::Type model(config);
  skip.reset();
  if (options.differences != nullptr) {
    const StateDict own = model.state_dict();
    for (const auto& [name, tensor] : own) {
      if (!state.contains(name) && !(has_tied_head(config) && name == kHeadWeight)) {
        options.differences->missing.push_back(name);
      }
    }
    for (const auto& [name, tensor] : state) {
      if (!own.contains(name)) {
        options.differences->unexpected.push_back(name);
      }
    }
    std::sort(options.differences->unexpected.begin(), options.differences->unexpected.end());
  }
  try {
    model.load_state_dict(state, options.strict, true);
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    std::string_view problem = error.what();
    constexpr std::string_view kBefore = "load_state_dict: ";
    problem.remove_prefix(problem.starts_with(kBefore) ? kBefore.size() : 0);
    fail("{}: {}", what, problem);
  }
  if (options.dtype.has_value()) {
    model.to(options.device, *options.dtype);
  } else {
    model.to(options.device);
  }
  model.eval();
  return model;
}

// Files.

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

// Saving.

/// Throws unless the tensors are those of the model's class alone: files have no others.
void check_plain(const StateDict& state, const char* op) {
  constexpr std::string_view kAdapter = ".lora_a", kQuantized = ".packed";
  for (const auto& [name, tensor] : state) {
    check(!name.ends_with(kAdapter),
          "{}: {} is part of an adapter: save it by io::save_adapter, or add it to the weights by nn::merge_lora", op,
          name);
    check(!name.ends_with(kQuantized), "{}: the weight of {} is quantized: save the model before nn::quantize", op,
          name.substr(0, name.size() - kQuantized.size()));
  }
}

// The tensors as transformers' files have them. Errors start with `op`.
StateDict file_state(const nn::GPT& model, const char* op) {
  const Layout layout = layout_of(model.config);
  const StateDict state = model.state_dict();
  check_plain(state, op);
  StateDict result;
  for (const auto& [name, tensor] : state) {
    if (name != kHeadWeight) {
      result.emplace(std::string(layout.prefix) + name,
                     is_transposed(layout, name, tensor) ? transpose(tensor, 0, 1) : tensor);
    }
  }
  return result;
}
StateDict file_state(const nn::Llama& model, const char* op) {
  StateDict result = model.state_dict();
  check_plain(result, op);
  if (model.config.tied_head) {
    result.erase(std::string(kHeadWeight));
  }
  return result;
}
StateDict file_state(const nn::Bert& model, const char* op) {
  StateDict result = model.state_dict();
  check_plain(result, op);
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
  const JsonValue::Object about{{"total_size", {total}}, {detail::kDescriptionKey, {config_checksum}}};
  write_text(folder / kShardIndex, to_json({JsonValue::Object{{"metadata", {about}}, {"weight_map", {map}}}}));
}

/// Replaces the weights in one step: model.safetensors takes its place, or the index does and then model.safetensors,
/// which readers prefer to it, is removed. Shards get new names, so that the old index keeps its own until then.
void write_weights(const std::filesystem::path& folder, const StateDict& state, std::uint64_t shard_bytes,
                   const std::string& config_checksum, const detail::FolderSave& saving) {
  remove_unfinished(folder,
                    [](const std::string& name) { return is_shard(name) || name == kWeights || name == kShardIndex; });
  remove_unlisted(folder, saving.noted());
  const std::set<std::string> old = shards_in(folder);
  const std::vector<StateDict> shards = shards_of(state, shard_bytes);
  saving.note({old.begin(), old.end()});
  if (shards.size() == 1) {
    save(folder / kWeights, state, {{"format", "pt"}, {detail::kDescriptionKey, config_checksum}});
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
    const auto found = metadata.find(detail::kDescriptionKey);
    return found == metadata.end() ? "" : found->second;
  }
  const JsonValue index = read_json(folder / kShardIndex, kLongestIndex);
  const JsonValue* const metadata = index.find("metadata");
  const JsonValue* const entry = metadata == nullptr ? nullptr : metadata->find(detail::kDescriptionKey);
  const auto* const checksum = entry == nullptr ? nullptr : entry->as<std::string>();
  return checksum == nullptr ? "" : *checksum;
}

std::filesystem::path config_file(const std::filesystem::path& folder) {
  return detail::description_file(folder, kConfig, config_checksum_in);
}

template <class Model>
void save_model(const Model& model, const std::filesystem::path& folder, const SaveOptions& options) {
  check(options.shard_bytes > 0, "save_pretrained: expected shard_bytes above 0");
  JsonValue::Object config = config_entries(model.config);  // may throw, so before anything is written
  const StateDict state = file_state(model, "save_pretrained");
  config["dtype"] = {fmt::format("{}", state.begin()->second.dtype())};
  config["torch_dtype"] = config["dtype"];  // the name that older versions read
  if (!options.like.empty()) {
    const JsonValue like = read_json(config_file(options.like), kLongestConfig);
    check(like.as<JsonValue::Object>() != nullptr, "save_pretrained: {} is not an object",
          (options.like / kConfig).string());
    for (const auto& [name, value] : *like.as<JsonValue::Object>()) {
      const auto at = config.find(name);
      if (at == config.end() || name.ends_with("_token_id")) {
        config[name] = value;
      }
    }
  }
  // The reader may refuse the model's own entries, and others could say something else: a window, say.
  const std::string what = options.like.empty()
                               ? "save_pretrained: read again"
                               : "save_pretrained: with the other entries of " + (options.like / kConfig).string();
  const JsonValue::Object own = config_entries(model.config), read = config_entries(pretrained_config({config}, what));
  check(to_json({read}) == to_json({own}), "{}, the model would be another", what);
  const std::string text = to_json({config});
  detail::FolderSave saving("save_pretrained", folder, kConfig, config_checksum_in, text);
  write_weights(folder, state, options.shard_bytes, detail::description_checksum(text), saving);
  saving.finish();
}

// The entries of both. If both have a key, the entry of b.
GgufMetadata united(GgufMetadata a, const GgufMetadata& b) {
  for (const auto& [key, value] : b) {
    a.insert_or_assign(key, value);
  }
  return a;
}

template <class Config>
GgufMetadata model_metadata(const Config& config, const GgufMetadata& more) {
  GgufMetadata all = detail::gguf_metadata(config);
  all["tokenizer.ggml.model"] = std::string("none");  // llama.cpp refuses models without this key
  return united(std::move(all), more);
}

template <class Model>
StateDict gguf_tensors(const Model& model) {
  StateDict tensors;
  for (const auto& [name, tensor] : file_state(model, "save_gguf")) {
    const detail::GgufParameter parameter = detail::gguf_parameter(model.config, name, tensor);
    tensors.emplace(parameter.name, parameter.tensor);
  }
  return tensors;
}

}  // namespace

PretrainedConfig load_pretrained_config(const std::filesystem::path& folder) {
  if (detail::is_gguf(folder)) {
    return detail::load_gguf_config(folder, "load_pretrained: " + folder.string());
  }
  check_folder(folder, "load_pretrained");
  const std::filesystem::path path = config_file(folder);
  return pretrained_config(read_json(path, kLongestConfig), "load_pretrained: " + path.string());
}

StateDict load_pretrained_tensors(const std::filesystem::path& folder) {
  if (detail::is_gguf(folder)) {
    return detail::load_gguf_model(folder, float32, "load_pretrained: " + folder.string()).tensors;
  }
  check_folder(folder, "load_pretrained");
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

PretrainedModel load_pretrained(const std::filesystem::path& folder, const LoadOptions& options) {
  check(!options.dtype.has_value() || is_floating(*options.dtype), "load_pretrained: expected a floating dtype, got {}",
        options.dtype.value_or(float32));
  if (detail::is_gguf(folder)) {
    const std::string what = "load_pretrained: " + folder.string();
    const detail::GgufModel model = detail::load_gguf_model(folder, options.dtype.value_or(float32), what);
    LoadOptions of_model = options;
    of_model.dtype = options.dtype.value_or(model.dtype);
    return std::visit([&](const auto& c) { return build(c, model.tensors, of_model, what); }, model.config);
  }
  const PretrainedConfig config = load_pretrained_config(folder);
  const StateDict files = load_pretrained_tensors(folder);
  const std::string what = "load_pretrained: " + folder.string();
  return std::visit([&](const auto& c) { return build(c, files, options, what); }, config);
}

void save_pretrained(const nn::GPT& model, const std::filesystem::path& folder, const SaveOptions& options) {
  save_model(model, folder, options);
}
void save_pretrained(const nn::Llama& model, const std::filesystem::path& folder, const SaveOptions& options) {
  save_model(model, folder, options);
}
void save_pretrained(const nn::Bert& model, const std::filesystem::path& folder, const SaveOptions& options) {
  save_model(model, folder, options);
}
void save_gguf(const std::filesystem::path& path, const nn::Llama& model, const GgufMetadata& metadata,
               const GgufSaveOptions& options) {
  StateDict tensors = gguf_tensors(model);
  if (const auto divisors = detail::gguf_frequency_divisors(model.config)) {
    tensors.emplace(divisors->name, divisors->tensor);
  }
  save_gguf(path, tensors, model_metadata(model.config, metadata), options);
}
void save_gguf(const std::filesystem::path& path, const nn::GPT& model, const GgufMetadata& metadata,
               const GgufSaveOptions& options) {
  save_gguf(path, gguf_tensors(model), model_metadata(model.config, metadata), options);
}
void save_gguf(const std::filesystem::path& path, const nn::Llama& model, const Tokenizer& tokenizer,
               const GgufMetadata& metadata, const GgufSaveOptions& options) {
  save_gguf(path, model, united(gguf_metadata(tokenizer, model.config.vocab), metadata), options);
}
void save_gguf(const std::filesystem::path& path, const nn::GPT& model, const Tokenizer& tokenizer,
               const GgufMetadata& metadata, const GgufSaveOptions& options) {
  save_gguf(path, model, united(gguf_metadata(tokenizer, model.config.vocab), metadata), options);
}
void save_pretrained(const PretrainedModel& model, const std::filesystem::path& folder, const SaveOptions& options) {
  std::visit([&](const auto& m) { save_model(m, folder, options); }, model);
}

}  // namespace mica::io
