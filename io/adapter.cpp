#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include <mica/core/copy.h>
#include <mica/io/adapter.h>
#include <mica/io/detail/folder_save.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/file.h>
#include <mica/io/json.h>
#include <mica/io/safetensors.h>
#include <mica/nn/detail/adapters.h>
#include <mica/nn/lora.h>

namespace mica::io {

namespace {

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr std::string_view kDown = ".lora_A.weight";
constexpr std::string_view kUp = ".lora_B.weight";

// With an adapter of the head, PEFT also saves the weight below.
constexpr std::string_view kBelow = ".base_layer.weight";

constexpr std::string_view kAdapterPrefix = "base_model.model.";  // PEFT's, before transformers' name of a layer

constexpr std::string_view kHeadLayer = "lm_head";

// transformers' name of a layer.
std::string target_of(const detail::FileTensors& files, const std::string& layer) {
  return layer == kHeadLayer ? layer : std::string(files.prefix) + layer;
}

// The layer whose tensor has this name in a file, without `ending`; empty if there is none.
std::string layer_of(const detail::FileTensors& files, std::string_view name, std::string_view ending) {
  if (!name.starts_with(kAdapterPrefix) || !name.ends_with(ending) ||
      name.size() < kAdapterPrefix.size() + ending.size()) {
    return "";
  }
  const std::string_view target =
      name.substr(kAdapterPrefix.size(), name.size() - kAdapterPrefix.size() - ending.size());
  return target == kHeadLayer               ? std::string(target)
         : target.starts_with(files.prefix) ? std::string(target.substr(files.prefix.size()))
                                            : "";
}

// Whether one is the other, rounded to its dtype if that is narrower.
bool is_copy(const Tensor& a, const Tensor& b) {
  const auto same_in = [&](DType dtype) {
    const Tensor x = contiguous_data(a.detach().to(Device::cpu(), dtype));
    const Tensor y = contiguous_data(b.detach().to(Device::cpu(), dtype));
    return std::memcmp(x.raw_data(), y.raw_data(), x.bytes()) == 0;
  };
  return a.shape() == b.shape() && (same_in(a.dtype()) || same_in(b.dtype()));
}

// The checksum of the configuration with which a folder's adapters were saved.
std::string checksum_in(const std::filesystem::path& folder) {
  const Metadata metadata = load_metadata(folder / kWeightsFile);
  const auto found = metadata.find(detail::kDescriptionKey);
  return found == metadata.end() ? "" : found->second;
}

// `task`: PEFT's name for the model's.
void save_adapter_of(nn::Module& model, const detail::FileTensors& files, std::string_view task,
                     const std::filesystem::path& folder, const std::string& base_model) {
  const std::vector<nn::AdaptedLayer> layers = nn::adapted_layers(model);
  check(!layers.empty(), "save_adapter: the model has no adapters: see nn::add_lora");
  const nn::LoraOptions& options = layers[0].layer->lora_options();
  StateDict state;
  JsonValue::Array targets;
  for (const auto& [name, layer] : layers) {
    const nn::LoraOptions& own = layer->lora_options();
    check(own.rank == options.rank && own.alpha == options.alpha && own.dropout == options.dropout,
          "save_adapter: expected all adapters to have the same rank, alpha and dropout, but those of {} differ", name);
    const std::string target = target_of(files, name);
    const std::string full = std::string(kAdapterPrefix) + target;
    state[full + std::string(kDown)] = layer->lora_a.detach();
    state[full + std::string(kUp)] = layer->lora_b.detach();
    targets.push_back({target});
  }
  const JsonValue config{JsonValue::Object{
      {"peft_type", {std::string("LORA")}},
      {"task_type", {std::string(task)}},
      {"base_model_name_or_path", base_model.empty() ? JsonValue{} : JsonValue{base_model}},
      {"r", {options.rank}},
      {"lora_alpha", {options.alpha}},
      {"lora_dropout", {options.dropout}},
      {"bias", {std::string("none")}},
      {"fan_in_fan_out", {!files.transposed.empty()}},
      {"inference_mode", {true}},
      {"target_modules", {targets}},
  }};
  const std::string text = to_json(config) + "\n";
  detail::FolderSave saving("save_adapter", folder, kConfigFile, checksum_in, text);
  save(folder / kWeightsFile, state, {{"format", "pt"}, {detail::kDescriptionKey, detail::description_checksum(text)}});
  saving.finish();
}

double number_of(const JsonValue* entry, double otherwise) {
  if (entry == nullptr || entry->is_null()) {
    return otherwise;
  }
  if (const auto* const whole = entry->as<std::int64_t>()) {
    return static_cast<double>(*whole);
  }
  const auto* const real = entry->as<double>();
  return real == nullptr ? NAN : *real;
}

// Whether an entry is absent, null, false, or empty, which means that PEFT does not use the feature.
bool is_unused(const JsonValue* entry) {
  if (entry == nullptr || entry->is_null()) {
    return true;
  }
  const auto* const flag = entry->as<bool>();
  const auto* const list = entry->as<JsonValue::Array>();
  const auto* const object = entry->as<JsonValue::Object>();
  return (flag != nullptr && !*flag) || (list != nullptr && list->empty()) || (object != nullptr && object->empty());
}

// Some ways to start change the weights below the adapter, and do so again when PEFT loads it. (If PEFT has converted
// the adapter to one of the original weights, it has set the entry to true.)
void check_start(const JsonValue* entry, const std::string& file) {
  const auto* const text = entry == nullptr ? nullptr : entry->as<std::string>();
  if (text == nullptr) {
    return;
  }
  std::string start = *text;
  std::transform(start.begin(), start.end(), start.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  check(start == "gaussian" || start == "eva" || start == "orthogonal" || start == "mica",
        "{}: init_lora_weights is \"{}\", which is not supported: it may change the weights below the adapter", file,
        *text);
}

nn::LoraOptions options_of(const JsonValue& config, const std::string& file) {
  const auto* const type = config.find("peft_type") == nullptr ? nullptr : config.find("peft_type")->as<std::string>();
  check(type != nullptr && *type == "LORA", "{}: expected peft_type LORA", file);
  for (const char* const name :
       {"use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "lora_bias",
        "trainable_token_indices", "use_qalora", "target_parameters", "alora_invocation_tokens"}) {
    check(is_unused(config.find(name)), "{}: {} is not supported", file, name);
  }
  for (const char* const name : {"kasa_config", "arrow_config", "use_bdlora"}) {  // used if they are empty objects, too
    const JsonValue* const entry = config.find(name);
    check(entry == nullptr || entry->as<JsonValue::Object>() == nullptr, "{}: {} is not supported", file, name);
    check(is_unused(entry), "{}: {} is not supported", file, name);
  }
  check_start(config.find("init_lora_weights"), file);
  if (const JsonValue* const bias = config.find("bias"); bias != nullptr && !bias->is_null()) {
    const auto* const which = bias->as<std::string>();
    check(which != nullptr && *which == "none", "{}: trained biases are not supported", file);
  }
  const double rank = number_of(config.find("r"), NAN), alpha = number_of(config.find("lora_alpha"), NAN);
  check(rank >= 1 && rank <= 1 << 20 && rank == std::floor(rank), "{}: expected a whole number r of at least 1", file);
  check(std::isfinite(alpha), "{}: expected a number lora_alpha", file);
  const double dropout = number_of(config.find("lora_dropout"), 0);
  check(dropout >= 0 && dropout < 1, "{}: expected lora_dropout in [0, 1)", file);
  // With use_rslora, PEFT divides alpha by √r instead of r.
  const bool by_root = !is_unused(config.find("use_rslora"));
  return {
      .rank = static_cast<std::int64_t>(rank), .alpha = by_root ? alpha * std::sqrt(rank) : alpha, .dropout = dropout};
}

void load_adapter_of(nn::Module& model, const detail::FileTensors& files, const std::filesystem::path& folder) {
  check_folder(folder, "load_adapter");
  const std::string config_file = detail::description_file(folder, kConfigFile, checksum_in).string(),
                    weights_file = (folder / kWeightsFile).string();
  const nn::LoraOptions options = options_of(read_json(config_file, 1 << 20), config_file);
  const StateDict state = load(weights_file);
  check(nn::adapted_layers(model).empty(), "load_adapter: the model already has adapters");

  struct Parts {
    Tensor down, up;
    Tensor below;  // the layer's own weight
  };
  std::map<std::string, Parts> parts;  // by the layer's name
  std::string problems;
  for (const auto& [name, tensor] : state) {
    const bool is_below = name.ends_with(kBelow), is_down = name.ends_with(kDown);
    const std::string layer = layer_of(files, name, is_below ? kBelow : is_down ? kDown : kUp);
    if (layer.empty()) {
      problems += "\n  unexpected: " + name;
      continue;
    }
    Parts& own = parts[layer];
    Tensor& part = is_below ? own.below : is_down ? own.down : own.up;
    if (part.defined()) {
      problems += fmt::format("\n  {}: it has two tensors {}", layer, name);
    }
    part = tensor;
  }
  std::map<std::string, nn::Linear*> layers;
  for (const auto& [name, layer] : nn::linear_layers(model)) {
    layers[name] = layer;
  }
  for (const auto& [name, own] : parts) {
    const auto found = layers.find(name);
    if (found == layers.end()) {
      problems += fmt::format("\n  the model has no linear layer {}", name);
      continue;
    }
    const nn::Linear& layer = *found->second;
    const Shape down{options.rank, layer.in_features()}, up{layer.out_features(), options.rank};
    if (!own.down.defined() || !own.up.defined() || own.down.shape() != down || own.up.shape() != up ||
        !is_floating(own.down.dtype()) || !is_floating(own.up.dtype())) {
      problems += fmt::format("\n  {}: expected floating lora_A {} and lora_B {}", name, down, up);
    }
    if (own.below.defined() && layer.is_quantized()) {
      problems += fmt::format(
          "\n  {}: it has a copy of the weight, which cannot be compared with a quantized one: load the adapter before "
          "nn::quantize",
          name);
    } else if (own.below.defined() && !is_copy(own.below, layer.weight)) {
      problems += fmt::format("\n  {}: it was trained on another weight, of which it has a copy", name);
    }
  }
  check(problems.empty() && !parts.empty(), "load_adapter: {} does not fit the model:{}", weights_file,
        problems.empty() ? "\n  it has no adapters" : problems);

  std::vector<nn::detail::NewAdapter> adapters;
  for (const auto& [name, own] : parts) {
    nn::Linear* const layer = layers.at(name);
    adapters.push_back({layer, layer->new_lora(options)});
    copy_into(adapters.back().parameters.a, own.down);
    copy_into(adapters.back().parameters.b, own.up);
  }
  nn::detail::add_adapters(model, adapters, options);
}

}  // namespace

void save_adapter(ModelReference model, const std::filesystem::path& folder, const std::string& base_model) {
  model.visit([&](auto& m) {
    const auto& family = detail::family_of(m.config);
    save_adapter_of(m, family.tensors, family.adapter_task, folder, base_model);
  });
}

void load_adapter(ModelReference model, const std::filesystem::path& folder) {
  model.visit([&](auto& m) { load_adapter_of(m, detail::family_of(m.config).tensors, folder); });
}

}  // namespace mica::io
