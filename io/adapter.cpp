#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/io/adapter.h>
#include <mica/io/detail/folder_save.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/file.h>
#include <mica/io/json.h>
#include <mica/io/safetensors.h>
#include <mica/nn/detail/adapters.h>
#include <mica/nn/lora.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica::io {

namespace {

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";

constexpr std::string_view kAdapterPrefix = "base_model.model.";  // PEFT's, before transformers' name of a layer

// The tensors of an adapted layer in a file. `below` and `bias` are the layer's own weight and bias: PEFT saves the
// weight with an adapter of the head, and the bias if it was trained.
struct LayerTensors {
  Tensor down, up, magnitude, below, bias;
};

struct Ending {
  std::string_view text;
  Tensor LayerTensors::*tensor;
};
constexpr std::array<Ending, 6> kEndings{{{".lora_A.weight", &LayerTensors::down},
                                          {".lora_B.weight", &LayerTensors::up},
                                          {".lora_magnitude_vector", &LayerTensors::magnitude},
                                          {".lora_magnitude_vector.weight", &LayerTensors::magnitude},
                                          {".base_layer.weight", &LayerTensors::below},
                                          {".base_layer.bias", &LayerTensors::bias}}};

// transformers' name of a layer.
std::string target_of(const detail::FileTensors& files, const std::string& layer) {
  std::string name = files.file_name(layer + ".");
  name.pop_back();
  return name;
}

// A layer's own name; empty if the name is not transformers' name of one.
std::string layer_of(const detail::FileTensors& files, std::string_view target) {
  std::string name = files.own_name(std::string(target) + ".", false);
  name.pop_back();
  return target.starts_with(files.prefix) || target_of(files, name) == target ? name : "";
}

bool ends_with_one(std::string_view name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const std::string& each) { return name.ends_with(each); });
}

// Whether modules_to_save has the module or one around it.
bool is_saved_whole(std::string_view module, const std::vector<std::string>& saved) {
  for (std::size_t end = module.size(); end != std::string_view::npos; end = module.rfind('.', end - 1)) {
    if (ends_with_one(module.substr(0, end), saved)) {
      return true;
    }
  }
  return false;
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

using TensorsByName = std::map<std::string, Tensor>;

// Trained parameters other than adapters, as PEFT's configuration describes them.
struct Others {
  std::string bias = "none";
  std::vector<std::string> modules;                     // modules_to_save
  std::vector<std::pair<std::string, Tensor>> tensors;  // with transformers' names
};

std::string module_of(const std::string& parameter) { return parameter.substr(0, parameter.rfind('.')); }

bool shares(const Tensor& a, const Tensor& b) { return a.raw_data() == b.raw_data(); }

// Throws if PEFT has no configuration for them. PEFT's head is a tensor of its own once it is trained, so a tied head
// is written beside the embedding.
Others trained_others(nn::Module& model, const detail::FileTensors& files,
                      const std::vector<nn::AdaptedLayer>& adapted) {
  const StateDict state = model.state_dict();
  TensorsByName trained, biases;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const bool is_adapter = name.find(".lora_") != std::string::npos;
    for (const auto& [own, tensor] : state) {
      if (!is_adapter && parameter.requires_grad() && shares(tensor, parameter)) {
        trained.emplace(own, tensor);
      }
      if (own == name && name.ends_with(".bias")) {
        biases.emplace(own, tensor);
      }
    }
  }
  std::set<std::string> modules;
  for (const auto& [name, tensor] : trained) {
    if (!name.ends_with(".bias")) {
      modules.insert(module_of(name));
    }
  }
  const auto is_whole = [&](const std::string& name) { return modules.contains(module_of(name)); };
  std::erase_if(biases, [&](const auto& entry) { return is_whole(entry.first); });
  TensorsByName of_adapted, own_biases = trained;
  std::erase_if(own_biases, [&](const auto& entry) { return is_whole(entry.first); });
  Others others;
  for (const auto& [name, layer] : adapted) {
    check(!modules.contains(name), "save_adapter: {} has an adapter, but its weight is trained, too", name);
    if (layer->bias.defined()) {
      of_adapted.emplace(name + ".bias", layer->bias);
    }
  }
  const auto same_names = [&](const TensorsByName& a) {
    return a.size() == own_biases.size() &&
           std::equal(a.begin(), a.end(), own_biases.begin(), [](auto& x, auto& y) { return x.first == y.first; });
  };
  if (!own_biases.empty()) {
    check(
        same_names(of_adapted) || same_names(biases),
        "save_adapter: PEFT trains the biases of the adapted layers, or all: expected one of these, but {} biases are "
        "trained",
        own_biases.size());
    others.bias = same_names(of_adapted) ? "lora_only" : "all";
  }
  for (const auto& [name, tensor] : own_biases) {
    const std::string target = target_of(files, module_of(name));
    others.tensors.emplace_back(target + (of_adapted.contains(name) ? ".base_layer.bias" : ".bias"), tensor);
  }
  for (const std::string& module : modules) {
    others.modules.push_back(target_of(files, module));
    for (const char* const part : {".weight", ".bias"}) {
      if (const auto found = state.find(module + part); found != state.end()) {
        const Tensor& tensor = found->second;
        others.tensors.emplace_back(others.modules.back() + part, files.is_transposed(found->first, tensor)
                                                                      ? contiguous_data(transpose(tensor, 0, 1))
                                                                      : tensor);
      }
    }
  }
  return others;
}

// `task`: PEFT's name for the model's.
void save_adapter_of(nn::Module& model, const detail::FileTensors& files, std::string_view task,
                     const std::filesystem::path& folder, const std::string& base_model) {
  const std::vector<nn::AdaptedLayer> layers = nn::adapted_layers(model);
  check(!layers.empty(), "save_adapter: the model has no adapters: see nn::add_lora");
  const nn::LoraOptions& options = layers[0].layer->lora_options();
  StateDict state;
  JsonValue::Array targets, modules;
  JsonValue::Object ranks, alphas;  // where they differ
  for (const auto& [name, layer] : layers) {
    const nn::LoraOptions& own = layer->lora_options();
    check(own.dora == options.dora && own.dropout == options.dropout,
          "save_adapter: expected all adapters to have the same dropout, and all or none DoRA, but those of {} differ",
          name);
    const std::string target = target_of(files, name);
    const std::string full = std::string(kAdapterPrefix) + target;
    state[full + ".lora_A.weight"] = layer->lora_a.detach();
    state[full + ".lora_B.weight"] = layer->lora_b.detach();
    if (own.dora) {
      state[full + ".lora_magnitude_vector"] = layer->lora_magnitude.detach();
    }
    if (own.rank != options.rank) {
      ranks[target] = {own.rank};
    }
    if (own.alpha != options.alpha) {
      alphas[target] = {own.alpha};
    }
    targets.push_back({target});
  }
  const Others others = trained_others(model, files, layers);
  for (const auto& [name, tensor] : others.tensors) {
    state[std::string(kAdapterPrefix) + name] = tensor.detach();
  }
  for (const std::string& module : others.modules) {
    modules.push_back({module});
  }
  const JsonValue config{JsonValue::Object{
      {"peft_type", {std::string("LORA")}},
      {"task_type", {std::string(task)}},
      {"base_model_name_or_path", base_model.empty() ? JsonValue{} : JsonValue{base_model}},
      {"r", {options.rank}},
      {"lora_alpha", {options.alpha}},
      {"lora_dropout", {options.dropout}},
      {"rank_pattern", {ranks}},
      {"alpha_pattern", {alphas}},
      {"use_dora", {options.dora}},
      {"bias", {others.bias}},
      {"modules_to_save", modules.empty() ? JsonValue{} : JsonValue{modules}},
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

// A key of rank_pattern or alpha_pattern: a regular expression for the end of a layer's name, at a dot, of which mica
// knows characters, ".", "\d" and a "*" or "+" after one of these, and escaped characters. "^" at the beginning stands
// for the beginning of the name.
class LayerPattern {
 public:
  LayerPattern(std::string_view text, const std::string& what) {
    whole_ = text.starts_with('^');
    text.remove_prefix(whole_ ? 1 : 0);
    text.remove_suffix(text.ends_with('$') && !text.ends_with("\\$") ? 1 : 0);
    while (!text.empty()) {
      const char first = text[0];
      const bool escaped = first == '\\' && text.size() > 1;
      const char c = escaped ? text[1] : first;
      const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
      check(escaped ? c == 'd' || !is_letter : is_letter || c == '_' || c == '-' || c == '.',
            "{}: the pattern {} is not supported: expected names, \".\", \"\\d\", \"*\" and \"+\"", what,
            detail::in_quotes(text));
      Piece piece{.kind = escaped    ? (c == 'd' ? Kind::digit : Kind::letter)
                          : c == '.' ? Kind::any
                                     : Kind::letter,
                  .letter = c};
      text.remove_prefix(escaped ? 2 : 1);
      if (text.starts_with('*') || text.starts_with('+')) {
        if (text[0] == '+') {
          pieces_.push_back(piece);
        }
        piece.repeats = true;
        text.remove_prefix(1);
      }
      pieces_.push_back(piece);
    }
  }

  bool matches(std::string_view name) const {
    for (std::size_t begin = 0; begin < name.size(); ++begin) {
      if ((begin == 0 || (!whole_ && name[begin - 1] == '.')) && matches_all(name.substr(begin))) {
        return true;
      }
    }
    return false;
  }

 private:
  enum class Kind : std::uint8_t { letter, any, digit };
  struct Piece {
    Kind kind = Kind::letter;
    char letter = 0;
    bool repeats = false;  // any number of times, also 0

    bool takes(char c) const { return kind == Kind::any || (kind == Kind::digit ? c >= '0' && c <= '9' : c == letter); }
  };

  // at[i]: whether the pieces so far match the first i characters. Takes time in proportion to both lengths.
  bool matches_all(std::string_view name) const {
    std::vector<char> at(name.size() + 1, 0);
    at[0] = 1;
    for (const Piece& piece : pieces_) {
      std::vector<char> next(name.size() + 1, 0);
      for (std::size_t i = 0; i <= name.size(); ++i) {
        const bool before = i > 0 && piece.takes(name[i - 1]);
        next[i] = piece.repeats ? at[i] != 0 || (before && next[i - 1] != 0) : before && at[i - 1] != 0;
      }
      at = std::move(next);
    }
    return at.back() != 0;
  }

  std::vector<Piece> pieces_;
  bool whole_ = false;
};

// rank_pattern or alpha_pattern: the first pattern that matches counts.
std::vector<std::pair<LayerPattern, double>> patterns_of(const JsonValue* entry, const std::string& what) {
  std::vector<std::pair<LayerPattern, double>> result;
  if (is_unused(entry)) {
    return result;
  }
  const auto* const object = entry->as<JsonValue::Object>();
  check(object != nullptr, "{}: expected an object", what);
  for (const auto& [pattern, value] : *object) {
    result.emplace_back(LayerPattern(pattern, what), number_of(&value, NAN));
    check(std::isfinite(result.back().second), "{}: expected numbers", what);
  }
  // JsonValue does not keep the order of keys, so which of several comes first is not known.
  return result;
}

std::vector<std::string> texts_of(const JsonValue* entry, const std::string& what) {
  std::vector<std::string> result;
  if (is_unused(entry)) {
    return result;
  }
  const auto* const list = entry->as<JsonValue::Array>();
  check(list != nullptr, "{}: expected a list of names", what);
  for (const JsonValue& each : *list) {
    const auto* const text = each.as<std::string>();
    check(text != nullptr && !text->empty(), "{}: expected a list of names", what);
    result.push_back(*text);
  }
  return result;
}

/// What adapter_config.json says.
struct AdapterConfig {
  nn::LoraOptions options;
  std::vector<std::pair<LayerPattern, double>> ranks, alphas;
  bool by_root = false;  // with use_rslora, PEFT divides alpha by √r instead of r
  std::string bias;      // none, all or lora_only
  std::vector<std::string> modules_to_save;

  AdapterConfig(const JsonValue& config, const std::string& file);

  nn::LoraOptions options_for(const std::string& target, const std::string& file) const {
    const auto value = [&](const auto& patterns, double otherwise) {
      double result = otherwise;
      int matches = 0;
      for (const auto& [pattern, number] : patterns) {
        if (pattern.matches(target)) {
          check(++matches == 1 || number == result, "{}: two patterns with different numbers match {}", file, target);
          result = number;
        }
      }
      return result;
    };
    nn::LoraOptions own = options;
    const double rank = value(ranks, static_cast<double>(options.rank));
    check_rank(rank, file);
    own.rank = static_cast<std::int64_t>(rank);
    own.alpha = value(alphas, options.alpha) * (by_root ? std::sqrt(rank) : 1);
    return own;
  }

 private:
  static void check_rank(double rank, const std::string& file) {
    check(rank >= 1 && rank <= 1 << 20 && rank == std::floor(rank), "{}: expected a whole number r of at least 1",
          file);
  }
};

AdapterConfig::AdapterConfig(const JsonValue& config, const std::string& file) {
  const auto* const type = config.find("peft_type") == nullptr ? nullptr : config.find("peft_type")->as<std::string>();
  check(type != nullptr && *type == "LORA", "{}: expected peft_type LORA", file);
  for (const char* const name : {"layer_replication", "lora_bias", "trainable_token_indices", "use_qalora",
                                 "target_parameters", "alora_invocation_tokens"}) {
    check(is_unused(config.find(name)), "{}: {} is not supported", file, name);
  }
  for (const char* const name : {"kasa_config", "arrow_config", "use_bdlora"}) {  // used if they are empty objects, too
    const JsonValue* const entry = config.find(name);
    check(entry == nullptr || entry->as<JsonValue::Object>() == nullptr, "{}: {} is not supported", file, name);
    check(is_unused(entry), "{}: {} is not supported", file, name);
  }
  check_start(config.find("init_lora_weights"), file);
  const JsonValue* const biases = config.find("bias");
  const auto* const which = biases == nullptr ? nullptr : biases->as<std::string>();
  bias = which == nullptr ? "none" : *which;
  check((biases == nullptr || biases->is_null() || which != nullptr) &&
            (bias == "none" || bias == "all" || bias == "lora_only"),
        "{}: expected bias none, all or lora_only", file);
  const double rank = number_of(config.find("r"), NAN), alpha = number_of(config.find("lora_alpha"), NAN);
  check_rank(rank, file);
  check(std::isfinite(alpha), "{}: expected a number lora_alpha", file);
  const double dropout = number_of(config.find("lora_dropout"), 0);
  check(dropout >= 0 && dropout < 1, "{}: expected lora_dropout in [0, 1)", file);
  by_root = !is_unused(config.find("use_rslora"));
  options = {.rank = static_cast<std::int64_t>(rank),
             .alpha = alpha,
             .dropout = dropout,
             .dora = !is_unused(config.find("use_dora"))};
  ranks = patterns_of(config.find("rank_pattern"), file + ": rank_pattern");
  alphas = patterns_of(config.find("alpha_pattern"), file + ": alpha_pattern");
  modules_to_save = texts_of(config.find("modules_to_save"), file + ": modules_to_save");
}

/// One call of load_adapter.
class AdapterLoader {
 public:
  AdapterLoader(nn::Module& model, const detail::FileTensors& files, const AdapterConfig& config,
                const std::string& config_file)
      : model_(model), files_(files), config_(config), config_file_(config_file), own_(model.state_dict()) {
    for (const auto& [name, layer] : nn::linear_layers(model)) {
      layers_[name] = layer;
    }
    for (const auto& [name, parameter] : model.named_parameters()) {
      parameters_.insert(parameter.raw_data());
    }
  }

  void load(const StateDict& state, const std::string& weights_file) {
    for (const auto& [name, tensor] : state) {
      sort(name, tensor);
    }
    for (const auto& [name, tensors] : adapted_) {
      check_layer(name, tensors);
    }
    check_tied();
    check(problems_.empty() && !adapted_.empty(), "load_adapter: {} does not fit the model:{}", weights_file,
          problems_.empty() ? "\n  it has no adapters" : problems_);
    apply();
  }

 private:
  template <class... Args>
  void problem(fmt::format_string<Args...> format, Args&&... args) {
    problems_ += "\n  " + fmt::format(format, std::forward<Args>(args)...);
  }

  // Finds the place of a tensor.
  void sort(const std::string& name, const Tensor& tensor) {
    if (!name.starts_with(kAdapterPrefix)) {
      problem("unexpected: {}", name);
      return;
    }
    const std::string_view rest = std::string_view(name).substr(kAdapterPrefix.size());
    // If all biases are trained, PEFT also saves those of modules_to_save under these names, and those before training.
    if (rest.ends_with(".modules_to_save.bias") || rest.ends_with(".original_module.bias")) {
      return;
    }
    for (const Ending& ending : kEndings) {
      if (!rest.ends_with(ending.text) || rest.size() <= ending.text.size()) {
        continue;
      }
      const std::string layer = layer_of(files_, rest.substr(0, rest.size() - ending.text.size()));
      if (layer.empty()) {
        problem("unexpected: {}", name);
        return;
      }
      Tensor& part = adapted_[layer].*ending.tensor;
      if (part.defined()) {
        problem("{}: it has two tensors {}", layer, name);
      }
      part = tensor;
      return;
    }
    sort_parameter(name, rest, tensor);
  }

  // A parameter that is not an adapter's: trained, or a copy of the model's own.
  void sort_parameter(const std::string& name, std::string_view rest, const Tensor& tensor) {
    const std::size_t dot = rest.rfind('.');
    const std::string_view target = rest.substr(0, dot == std::string_view::npos ? 0 : dot);
    const std::string layer = layer_of(files_, target);
    const std::string own_name = layer + std::string(rest.substr(target.size()));
    const auto own = own_.find(own_name);
    if (layer.empty() || own == own_.end() || !parameters_.contains(own->second.raw_data())) {
      problem("unexpected: {}", name);
      return;
    }
    const Tensor value = files_.is_transposed(own_name, tensor) ? transpose(tensor, 0, 1) : tensor;
    const bool is_trained =
        is_saved_whole(target, config_.modules_to_save) || (config_.bias == "all" && own_name.ends_with(".bias"));
    if (!is_trained && is_copy(value, own->second)) {
      return;  // PEFT also saves embeddings that were not trained
    }
    if (!is_trained) {
      problem("{}: it was trained on another tensor, of which it has a copy, or modules_to_save lacks it", own_name);
    }
    replace(own_name, value);
  }

  void replace(const std::string& own_name, const Tensor& value) {
    const Tensor& own = own_.at(own_name);
    if (value.shape() != own.shape() || !is_floating(value.dtype())) {
      problem("{}: expected a floating tensor of shape {}, got {} {}", own_name, own.shape(), value.dtype(),
              value.shape());
    }
    replaced_[own_name] = value;
  }

  void check_layer(const std::string& name, const LayerTensors& tensors) {
    const auto found = layers_.find(name);
    if (found == layers_.end()) {
      problem("the model has no linear layer {}", name);
      return;
    }
    const nn::Linear& layer = *found->second;
    const nn::LoraOptions options = config_.options_for(target_of(files_, name), config_file_);
    const Shape down{options.rank, layer.in_features()}, up{layer.out_features(), options.rank};
    const auto fits = [](const Tensor& x, const Shape& shape) {
      return x.defined() && x.shape() == shape && is_floating(x.dtype());
    };
    if (!fits(tensors.down, down) || !fits(tensors.up, up)) {
      problem("{}: expected floating lora_A {} and lora_B {}", name, down, up);
    }
    if (options.dora ? !fits(tensors.magnitude, {layer.out_features()}) : tensors.magnitude.defined()) {
      problem("{}: expected {}", name,
              options.dora ? fmt::format("a floating lora_magnitude_vector [{}]", layer.out_features())
                           : std::string("no lora_magnitude_vector without use_dora"));
    }
    if (tensors.below.defined() && !is_below(tensors.below, layer)) {
      problem("{}: it was trained on another weight, of which it has a copy", name);
    }
    if (tensors.bias.defined()) {
      if (!layer.bias.defined()) {
        problem("{}: the layer has no bias", name);
      } else if (config_.bias != "none") {
        replace(name + ".bias", tensors.bias);
      } else if (!is_copy(tensors.bias, layer.bias)) {
        problem("{}: it was trained on another bias, of which it has a copy", name);
      }
    }
    if (replaced_.contains(name + ".weight")) {
      problem("{}: it has an adapter and, in modules_to_save, a weight", name);
    }
  }

  // Whether a weight is the layer's or, if that is quantized, differs by no more than rounding to few bits.
  static bool is_below(const Tensor& weight, const nn::Linear& layer) {
    if (!layer.is_quantized()) {
      return is_copy(weight, layer.weight);
    }
    if (weight.shape() != Shape{layer.out_features(), layer.in_features()} || !is_floating(weight.dtype())) {
      return false;
    }
    constexpr double kMost = 0.25;  // of the weight's norm; 4 bits change normal numbers by about 0.1
    const autograd::NoGrad no_grad;
    const Tensor own = transpose(dequantize(layer.quantized, float32), 0, 1);
    const Tensor copy = weight.detach().to(own.device(), float32);
    return vector_norm(own - copy).item() <= kMost * vector_norm(copy).item();
  }

  // PEFT trains a head apart from the embedding to which it was tied, which mica's models cannot.
  void check_tied() {
    for (const auto& [name, value] : replaced_) {
      for (const auto& [other, tensor] : own_) {
        if (other == name || !shares(tensor, own_.at(name))) {
          continue;
        }
        const auto found = replaced_.find(other);
        if (found == replaced_.end() || !is_copy(found->second, value)) {
          problem("{}: it is tied to {}, which has another value in the adapter", name, other);
        }
      }
    }
  }

  // Nothing is changed before all memory has been allocated.
  void apply() {
    std::vector<nn::detail::NewAdapter> adapters;
    for (const auto& [name, tensors] : adapted_) {
      nn::Linear* const layer = layers_.at(name);
      const nn::LoraOptions options = config_.options_for(target_of(files_, name), config_file_);
      adapters.push_back({layer, options, layer->new_lora(options)});
      const nn::LoraParameters& parameters = adapters.back().parameters;
      copy_into(parameters.a, tensors.down);
      copy_into(parameters.b, tensors.up);
      if (options.dora) {
        copy_into(parameters.magnitude, tensors.magnitude);
      }
    }
    std::vector<std::pair<Tensor, Tensor>> values;
    for (const auto& [name, value] : replaced_) {
      const Tensor own = own_.at(name);
      values.emplace_back(own, value.detach().to(own.device(), own.dtype()));
    }
    Tensors trained;
    for (const Tensor& parameter : model_.parameters()) {
      if (std::any_of(values.begin(), values.end(), [&](const auto& pair) { return shares(pair.first, parameter); })) {
        trained.push_back(parameter);
      }
    }
    nn::detail::add_adapters(model_, adapters);
    for (const auto& [own, value] : values) {
      copy_into(own, value);
    }
    for (const Tensor& parameter : trained) {
      parameter.requires_grad_();
    }
  }

  nn::Module& model_;
  const detail::FileTensors& files_;
  const AdapterConfig& config_;
  const std::string& config_file_;
  StateDict own_;
  std::map<std::string, nn::Linear*> layers_;
  std::set<const void*> parameters_;
  std::map<std::string, LayerTensors> adapted_;  // by the layer's name
  std::map<std::string, Tensor> replaced_;       // by the parameter's name
  std::string problems_;
};

// PEFT adapts a layer of the files that the model has in parts (Phi 3). Each part gets the whole lora_A, and its rows
// of the other tensors.
void split_adapters(const std::vector<detail::FusedRows>& fused, StateDict& state, const std::string& what) {
  constexpr std::string_view kDown = ".lora_A.weight";
  for (const detail::FusedRows& f : fused) {
    for (auto at = state.begin(); at != state.end();) {
      const auto [before, after] = detail::around_layer(at->first, f.layer);
      if (after != kDown) {
        ++at;
        continue;
      }
      const Tensor down = at->second;
      at = state.erase(at);
      for (const auto& [part, rows] : f.parts) {
        state.emplace(fmt::format("{}{}{}", before, part, after), down);
      }
    }
  }
  detail::split_rows(
      fused, state, [](Tensor& tensor) -> Tensor& { return tensor; }, what);
}

void load_adapter_of(nn::Module& model, const detail::FileTensors& files, const std::vector<detail::FusedRows>& fused,
                     const std::filesystem::path& folder) {
  check_folder(folder, "load_adapter");
  const std::string config_file = detail::description_file(folder, kConfigFile, checksum_in).string(),
                    weights_file = (folder / kWeightsFile).string();
  const AdapterConfig config(read_json(config_file, 1 << 20), config_file);
  StateDict state = load(weights_file);
  check(nn::adapted_layers(model).empty(), "load_adapter: the model already has adapters");
  split_adapters(fused, state, "load_adapter: " + weights_file);
  AdapterLoader(model, files, config, config_file).load(state, weights_file);
}

}  // namespace

void save_adapter(ModelReference model, const std::filesystem::path& folder, const std::string& base_model) {
  model.visit([&](auto& m) {
    const auto& family = detail::family_of(m.config);
    save_adapter_of(m, family.files(m.config), family.adapter_task, folder, base_model);
  });
}

void load_adapter(ModelReference model, const std::filesystem::path& folder) {
  model.visit([&](auto& m) {
    const auto& family = detail::family_of(m.config);
    load_adapter_of(m, family.files(m.config), family.fused(m.config), folder);
  });
}

}  // namespace mica::io
