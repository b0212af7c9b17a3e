#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/pretrained_config.h>
#include <mica/nn/detail/most_layers.h>

namespace mica::io {

namespace {

// Limits above the sizes of any model, so low that products of a few of them fit in 64 bits.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;
constexpr std::int64_t kMostPositions = std::int64_t{1} << 31;
using nn::detail::kMostLayers;
constexpr std::int64_t kMostHeads = 4096;
constexpr std::int64_t kWidestHead = 512;  // the limit of mica::rotary
constexpr std::int64_t kWidest = std::int64_t{1} << 20;
constexpr double kLeastTheta = 1.000001;

/// Reads the entries of a JSON object; errors name the entry.
class Entries {
 public:
  /// `prefix` is the object's own name with a dot, for nested ones.
  Entries(const JsonValue& json, std::string what, std::string prefix = "")
      : json_(json), what_(std::move(what)), prefix_(std::move(prefix)) {
    check(json.as<JsonValue::Object>() != nullptr, "{}: expected an object of entries", what_);
  }

  /// Null counts as absent.
  bool has(const std::string& name) const { return find(name) != nullptr; }
  /// Null does not count as absent.
  bool has_key(const std::string& name) const { return json_.find(name) != nullptr; }
  bool is_empty() const { return json_.as<JsonValue::Object>()->empty(); }
  const JsonValue* find(const std::string& name) const {
    const JsonValue* const value = json_.find(name);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  std::int64_t count(const std::string& name, std::int64_t least, std::int64_t most,
                     std::optional<std::int64_t> absent = {}) const {
    const JsonValue* const value = find_or(name, absent.has_value());
    if (value == nullptr) {
      return *absent;
    }
    const auto* const number = value->as<std::int64_t>();
    if (number == nullptr || *number < least || *number > most) {
      refuse(name, fmt::format("a whole number from {} to {}", least, most));
    }
    return *number;
  }

  double number(const std::string& name, double least, std::optional<double> absent = {}) const {
    const JsonValue* const value = find_or(name, absent.has_value());
    if (value == nullptr) {
      return *absent;
    }
    const double number = number_of(*value);
    if (!(number >= least && std::isfinite(number))) {
      refuse(name, fmt::format("a number of at least {}", least));
    }
    return number;
  }

  double probability(const std::string& name, double absent) const {
    const double p = number(name, 0, absent);
    if (p >= 1) {
      refuse(name, "a number in [0, 1)");
    }
    return p;
  }

  bool flag(const std::string& name, bool absent) const {
    const JsonValue* const value = find(name);
    if (value == nullptr) {
      return absent;
    }
    if (value->as<bool>() == nullptr) {
      refuse(name, "true or false");
    }
    return *value->as<bool>();
  }

  std::string text(const std::string& name, std::optional<std::string> absent = {}) const {
    const JsonValue* const value = find_or(name, absent.has_value());
    if (value == nullptr) {
      return *absent;
    }
    if (value->as<std::string>() == nullptr) {
      refuse(name, "a text");
    }
    return *value->as<std::string>();
  }

  /// Throws unless the entry is absent or `expected`.
  void require_flag(const std::string& name, bool expected) const {
    if (flag(name, expected) != expected) {
      refuse(name, fmt::format("{}: mica has no other", expected));
    }
  }
  void require_text(const std::string& name, std::string_view expected) const {
    if (text(name, std::string(expected)) != expected) {
      refuse(name, fmt::format("\"{}\": mica has no other", expected));
    }
  }

  /// The value for a string entry, or for `absent` without one. Throws unless `choices` has it.
  template <class T, std::size_t N>
  T choice(const std::string& name, const std::string& absent,
           const std::array<std::pair<std::string_view, T>, N>& choices) const {
    const std::string chosen = text(name, absent);
    std::string names;
    for (const auto& [own, value] : choices) {
      if (own == chosen) {
        return value;
      }
      names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", own);
    }
    refuse(name, "one of " + names);
  }

  /// Numbers above 0, as many as `count`.
  std::vector<double> numbers(const std::string& name, std::int64_t count) const {
    const std::string expected = fmt::format("{} numbers above 0", count);
    const auto* const list = find_or(name, false)->as<JsonValue::Array>();
    if (list == nullptr) {
      refuse(name, "a list of " + expected);
    }
    check(static_cast<std::int64_t>(list->size()) == count, "{}: \"{}{}\" has {} elements, expected {}", what_, prefix_,
          name, list->size(), expected);
    std::vector<double> result;
    for (const JsonValue& element : *list) {
      const double number = number_of(element);
      const auto rounded = static_cast<float>(number);  // as which frequencies are computed
      if (!(rounded > 0 && std::isfinite(rounded))) {
        fail("{}: element {} of \"{}{}\" is {}, expected a finite number above 0", what_, result.size(), prefix_, name,
             shown(&element));
      }
      result.push_back(number);
    }
    return result;
  }

  std::optional<Entries> nested(const std::string& name) const {
    const JsonValue* const value = find(name);
    if (value == nullptr) {
      return std::nullopt;
    }
    if (value->as<JsonValue::Object>() == nullptr) {
      refuse(name, "an object");
    }
    return Entries(*value, what_, prefix_ + name + ".");
  }

  /// Throws if an entry is an object.
  void refuse_nested(const std::string& expected) const {
    for (const auto& [name, value] : *json_.as<JsonValue::Object>()) {
      if (value.as<JsonValue::Object>() != nullptr) {
        refuse(name, expected);
      }
    }
  }

  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const {
    fail("{}: \"{}{}\" is {}, expected {}", what_, prefix_, name, shown(find(name)), expected);
  }

 private:
  static double number_of(const JsonValue& value) {
    const auto* const whole = value.as<std::int64_t>();
    const auto* const real = value.as<double>();
    return whole != nullptr  ? static_cast<double>(*whole)
           : real != nullptr ? *real
                             : std::numeric_limits<double>::quiet_NaN();
  }

  static std::string shown(const JsonValue* value) {
    std::string text = value == nullptr ? "nothing" : to_json(*value);
    text = text.substr(0, text.find_last_not_of('\n') + 1);
    constexpr std::size_t kMostShown = 80;
    return text.size() > kMostShown ? "a longer value" : text;
  }

  const JsonValue* find_or(const std::string& name, bool is_optional) const {
    const JsonValue* const value = find(name);
    check(value != nullptr || is_optional, "{}: \"{}{}\" is missing", what_, prefix_, name);
    return value;
  }

  const JsonValue& json_;
  std::string what_;
  std::string prefix_;
};

constexpr const char* kPytorchTanh = "gelu_pytorch_tanh";

constexpr std::array<std::pair<std::string_view, GeluApproximation>, 3> kGelus{{
    {"gelu_new", GeluApproximation::tanh},
    {kPytorchTanh, GeluApproximation::tanh},
    {"gelu", GeluApproximation::none},
}};

constexpr std::array<std::pair<std::string_view, Activation>, 4> kActivations{{
    {"gelu", Activation::gelu},
    {"gelu_new", Activation::gelu_tanh},
    {kPytorchTanh, Activation::gelu_tanh},
    {"relu", Activation::relu},
}};

constexpr std::array<std::pair<std::string_view, nn::RotaryScaling>, 7> kScalings{{
    {"default", nn::RotaryScaling::none},
    {"linear", nn::RotaryScaling::linear},
    {"dynamic", nn::RotaryScaling::dynamic},
    {"yarn", nn::RotaryScaling::yarn},
    {"llama3", nn::RotaryScaling::llama3},
    {"longrope", nn::RotaryScaling::longrope},
    {"su", nn::RotaryScaling::longrope},  // its first name
}};

template <class T, std::size_t N>
std::string name_of(T value, const std::array<std::pair<std::string_view, T>, N>& choices) {
  for (const auto& [name, own] : choices) {
    if (own == value) {
      return std::string(name);
    }
  }
  fail("save_pretrained: transformers has no name for this activation");
}

void check_heads(const Entries& c, const char* heads_name, std::int64_t heads, const char* width_name,
                 std::int64_t width) {
  if (width % heads != 0) {
    c.refuse(heads_name, fmt::format("a divisor of \"{}\", {}", width_name, width));
  }
}

nn::GPTConfig gpt_config(const Entries& c) {
  nn::GPTConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                       .context = c.count("n_positions", 1, kMostPositions),
                       .layers = c.count("n_layer", 0, kMostLayers),
                       .heads = c.count("n_head", 1, kMostHeads),
                       .width = c.count("n_embd", 1, kWidest),
                       .dropout = c.probability("resid_pdrop", 0.1)};
  check_heads(c, "n_head", result.heads, "n_embd", result.width);
  for (const auto& [name, own] :
       {std::pair{"embd_pdrop", &result.embedding_dropout}, std::pair{"attn_pdrop", &result.attention_dropout}}) {
    if (const double p = c.probability(name, 0.1); p != result.dropout) {
      *own = p;
    }
  }
  if (c.count("n_inner", 1, 4 * kWidest, 4 * result.width) != 4 * result.width) {
    c.refuse("n_inner", fmt::format("four times \"n_embd\", {}", 4 * result.width));
  }
  result.gelu = c.choice("activation_function", "gelu_new", kGelus);
  result.gelu_pytorch_tanh = c.text("activation_function", "") == kPytorchTanh;
  result.norm_eps = c.number("layer_norm_epsilon", 0, 1e-5);
  c.require_flag("scale_attn_weights", true);
  c.require_flag("scale_attn_by_inverse_layer_idx", false);
  c.require_flag("tie_word_embeddings", true);
  c.require_flag("add_cross_attention", false);
  c.require_flag("is_causal", true);
  return result;
}

// transformers 5 writes rope_parameters, with rope_theta in it; older versions write rope_theta and rope_scaling. If
// both are there, transformers 5 takes rope_scaling.
nn::RotaryConfig rotary_config(const Entries& c, std::int64_t context, std::int64_t head_width, double default_theta) {
  const std::optional<Entries> older = c.nested("rope_scaling"), newer = c.nested("rope_parameters");
  const std::optional<Entries>& parameters = older.has_value() && !older->is_empty() ? older : newer;
  nn::RotaryConfig result{.theta = c.number("rope_theta", kLeastTheta, default_theta)};
  for (const std::optional<Entries>& entries : {std::optional(c), parameters}) {
    if (entries.has_value() && entries->number("partial_rotary_factor", 0, 1.0) != 1) {
      entries->refuse("partial_rotary_factor", "1: mica rotates whole heads");
    }
  }
  if (!parameters.has_value()) {
    return result;
  }
  const Entries& p = *parameters;
  p.refuse_nested("one rotary embedding for all kinds of layers: mica has no other");
  result.theta = p.number("rope_theta", kLeastTheta, result.theta);
  result.scaling = p.choice(p.has("rope_type") || !p.has("type") ? "rope_type" : "type", "default", kScalings);
  if (result.scaling == nn::RotaryScaling::none) {
    return result;
  }
  using nn::RotaryScaling;
  constexpr double kLeast = 1e-6;
  const bool is_yarn = result.scaling == RotaryScaling::yarn, is_longrope = result.scaling == RotaryScaling::longrope;
  // Dynamic scaling starts from max_position_embeddings, even if there is original_max_position_embeddings. The others
  // prefer the entry outside the object, where Phi-3 has it.
  constexpr const char* kOriginal = "original_max_position_embeddings";
  const bool has_context = is_yarn || is_longrope || result.scaling == RotaryScaling::llama3;
  result.original_context =
      has_context ? (c.has(kOriginal) ? c : p).count(kOriginal, 1, kMostPositions, context) : context;
  result.factor = (is_yarn || is_longrope) && !p.has("factor")
                      ? static_cast<double>(context) / static_cast<double>(result.original_context)
                      : p.number("factor", kLeast);
  if (result.scaling == RotaryScaling::llama3) {
    result.low_frequency_factor = p.number("low_freq_factor", kLeast);
    result.high_frequency_factor = p.number("high_freq_factor", kLeast);
    if (result.high_frequency_factor <= result.low_frequency_factor) {
      p.refuse("high_freq_factor", fmt::format("more than \"low_freq_factor\", {}", result.low_frequency_factor));
    }
  }
  if ((is_yarn || is_longrope) && p.has("attention_factor")) {
    result.attention_factor = p.number("attention_factor", 0);
  }
  if (is_longrope) {
    result.short_factors = p.numbers("short_factor", head_width / 2);
    result.long_factors = p.numbers("long_factor", head_width / 2);
    if (result.factor > 1 && result.original_context == 1 && !result.attention_factor.has_value()) {
      (c.has(kOriginal) ? c : p).refuse(kOriginal, "more than 1, by whose logarithm attention is scaled");
    }
  }
  if (is_yarn) {
    const auto beta = [&](const char* name, double absent) {  // 0 counts as absent, too
      const double value = p.number(name, 0, absent);
      return value == 0 ? absent : value;
    };
    result.beta_fast = beta("beta_fast", 32.0);
    result.beta_slow = beta("beta_slow", 1.0);
    if (result.beta_fast < result.beta_slow) {
      p.refuse("beta_fast", fmt::format("at least \"beta_slow\", {}", result.beta_slow));
    }
    result.truncate = p.flag("truncate", true);
    const auto scale_for = [&](double m) { return result.factor <= 1 ? 1 : 0.1 * m * std::log(result.factor) + 1; };
    const double mscale = p.number("mscale", 0, 0.0), all = p.number("mscale_all_dim", 0, 0.0);
    if (!result.attention_factor.has_value() && mscale != 0 && all != 0) {
      result.attention_factor = scale_for(mscale) / scale_for(all);
    }
  }
  return result;
}

// Attention in windows, which mica does not have. What counts if an entry is missing is transformers' default.
void refuse_windows(const Entries& c, const std::string& type, std::int64_t layers) {
  const std::string window = "sliding_window", expected = "null: mica has no attention in windows";
  if (c.has("layer_types")) {
    const auto* const kinds = c.find("layer_types")->as<JsonValue::Array>();
    const auto is_full = [](const JsonValue& kind) {
      return kind.as<std::string>() != nullptr && *kind.as<std::string>() == "full_attention";
    };
    if (kinds == nullptr || static_cast<std::int64_t>(kinds->size()) != layers ||
        !std::all_of(kinds->begin(), kinds->end(), is_full)) {
      c.refuse("layer_types", fmt::format("\"full_attention\" {} times: mica has no other", layers));
    }
  }
  // A window is in use in Mistral's configurations if it is given or missing, and in those of Qwen and SmolLM if it is
  // asked for too.
  if (type == "mistral") {
    if (c.has(window) || !c.has_key(window)) {
      c.refuse(window, expected);
    }
  } else if (type != "llama" && c.flag("use_sliding_window", false)) {
    if (c.has(window) || (type != "smollm3" && !c.has_key(window))) {
      c.refuse(window, expected);
    }
  }
}

// Which layers of SmolLM 3 have rotary embeddings.
std::vector<bool> rotated_layers(const Entries& c, std::int64_t layers) {
  std::vector<bool> result;
  const std::int64_t interval = c.count("no_rope_layer_interval", 1, kMostLayers, 4);
  const JsonValue* const flags = c.find("no_rope_layers");
  if (flags == nullptr) {
    for (std::int64_t i = 1; i <= layers; ++i) {
      result.push_back(i % interval != 0);
    }
    return result;
  }
  // There may be more of them than layers.
  const auto* const list = flags->as<JsonValue::Array>();
  const std::int64_t count = list == nullptr ? 0 : std::min(static_cast<std::int64_t>(list->size()), layers);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto* const number = (*list)[static_cast<std::size_t>(i)].as<std::int64_t>();
    if (number != nullptr && (*number == 0 || *number == 1)) {
      result.push_back(*number == 1);
    }
  }
  if (list == nullptr || static_cast<std::int64_t>(result.size()) != layers) {
    c.refuse("no_rope_layers", fmt::format("1 (rotary embeddings) or 0 (none) for each of the {} layers", layers));
  }
  return result;
}

nn::LlamaConfig llama_config(const Entries& c, const std::string& type) {
  nn::LlamaConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                         .context = c.count("max_position_embeddings", 1, kMostPositions),
                         .layers = c.count("num_hidden_layers", 0, kMostLayers),
                         .heads = c.count("num_attention_heads", 1, kMostHeads),
                         .width = c.count("hidden_size", 1, kWidest),
                         .hidden = c.count("intermediate_size", 1, 16 * kWidest),
                         .norm_eps = c.number("rms_norm_eps", 0, 1e-6),
                         .rotary = {},
                         .rotated_layers = {},
                         .tied_head = c.flag("tie_word_embeddings", type == "smollm3")};
  result.key_heads = c.count("num_key_value_heads", 1, kMostHeads, result.heads);
  if (result.heads % result.key_heads != 0) {
    c.refuse("num_key_value_heads", fmt::format("a divisor of \"num_attention_heads\", {}", result.heads));
  }
  if (type == "qwen3") {
    result.head_width = c.count("head_dim", 2, kWidestHead, 128);
  } else if (c.has("head_dim")) {
    result.head_width = c.count("head_dim", 2, kWidestHead);
  } else {
    check_heads(c, "num_attention_heads", result.heads, "hidden_size", result.width);
    result.head_width = result.width / result.heads;
  }
  if (result.head_width % 2 != 0 || result.head_width > kWidestHead) {
    c.refuse("head_dim",
             fmt::format("an even number up to {} (or hidden_size / num_attention_heads to be one)", kWidestHead));
  }
  result.rotary = rotary_config(c, result.context, result.head_width, type == "smollm3" ? 2e6 : 1e4);
  result.dropout = c.probability("attention_dropout", 0);
  c.require_text("hidden_act", "silu");
  c.require_flag("is_causal", true);
  if (type == "llama" || type == "qwen3" || type == "smollm3") {
    result.qkv_bias = result.output_bias = c.flag("attention_bias", false);
  } else if (type == "qwen2") {
    result.qkv_bias = true;
  }
  result.mlp_bias = (type == "llama" || type == "smollm3") && c.flag("mlp_bias", false);
  result.qk_norm = type == "qwen3";
  if (type == "smollm3") {
    result.rotated_layers = rotated_layers(c, result.layers);
  }
  refuse_windows(c, type, result.layers);
  return result;
}

nn::BertConfig bert_config(const Entries& c) {
  nn::BertConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                        .context = c.count("max_position_embeddings", 1, kMostPositions),
                        .types = c.count("type_vocab_size", 1, kMostTokens, 2),
                        .layers = c.count("num_hidden_layers", 0, kMostLayers),
                        .heads = c.count("num_attention_heads", 1, kMostHeads),
                        .width = c.count("hidden_size", 1, kWidest),
                        .hidden = c.count("intermediate_size", 1, 16 * kWidest),
                        .norm_eps = c.number("layer_norm_eps", 0, 1e-12),
                        .dropout = c.probability("hidden_dropout_prob", 0.1),
                        .attention_dropout = c.probability("attention_probs_dropout_prob", 0.1),
                        .activation = c.choice("hidden_act", "gelu", kActivations),
                        .gelu_pytorch_tanh = c.text("hidden_act", "") == kPytorchTanh};
  check_heads(c, "num_attention_heads", result.heads, "hidden_size", result.width);
  c.require_text("position_embedding_type", "absolute");
  c.require_flag("is_decoder", false);
  return result;
}

JsonValue json(std::int64_t value) { return {value}; }
JsonValue json(double value) { return {value}; }
JsonValue json(bool value) { return {value}; }
JsonValue json(std::string value) { return {std::move(value)}; }

JsonValue list(const char* only) { return {JsonValue::Array{json(std::string(only))}}; }
template <class T>
JsonValue list(const std::vector<T>& values) {
  JsonValue::Array result;
  for (const T value : values) {
    result.push_back(json(value));
  }
  return {std::move(result)};
}

JsonValue::Object entries_of(const nn::GPTConfig& c) {
  check(c.bias, "save_pretrained: transformers has no GPT-2 without biases");
  return {{"model_type", json(std::string("gpt2"))},
          {"architectures", list("GPT2LMHeadModel")},
          {"vocab_size", json(c.vocab)},
          {"n_positions", json(c.context)},
          {"n_layer", json(c.layers)},
          {"n_head", json(c.heads)},
          {"n_embd", json(c.width)},
          {"n_inner", {}},
          {"activation_function",
           json(c.gelu == GeluApproximation::tanh && c.gelu_pytorch_tanh ? kPytorchTanh : name_of(c.gelu, kGelus))},
          {"layer_norm_epsilon", json(c.norm_eps)},
          {"resid_pdrop", json(c.dropout)},
          {"embd_pdrop", json(c.embedding_dropout.value_or(c.dropout))},
          {"attn_pdrop", json(c.attention_dropout.value_or(c.dropout))},
          {"scale_attn_weights", json(true)},
          {"scale_attn_by_inverse_layer_idx", json(false)},
          {"add_cross_attention", json(false)},
          {"tie_word_embeddings", json(true)},
          {"bos_token_id", {}},
          {"eos_token_id", {}}};
}

// Writes the form of transformers 5, and also rope_theta and rope_scaling for older versions.
void add_rotary_entries(JsonValue::Object& entries, const nn::RotaryConfig& c) {
  JsonValue::Object scaling{{"rope_type", json(name_of(c.scaling, kScalings))}};
  using nn::RotaryScaling;
  if (c.scaling != RotaryScaling::none) {
    scaling["factor"] = json(c.factor);
  }
  const bool is_longrope = c.scaling == RotaryScaling::longrope;
  if (c.scaling == RotaryScaling::yarn || c.scaling == RotaryScaling::llama3 || is_longrope) {
    scaling["original_max_position_embeddings"] = json(c.original_context);
  }
  if (c.scaling == RotaryScaling::llama3) {
    scaling["low_freq_factor"] = json(c.low_frequency_factor);
    scaling["high_freq_factor"] = json(c.high_frequency_factor);
  }
  if (c.scaling == RotaryScaling::yarn) {
    scaling["beta_fast"] = json(c.beta_fast);
    scaling["beta_slow"] = json(c.beta_slow);
    scaling["truncate"] = json(c.truncate);
  }
  if (is_longrope) {
    scaling["short_factor"] = list(c.short_factors);
    scaling["long_factor"] = list(c.long_factors);
  }
  if ((c.scaling == RotaryScaling::yarn || is_longrope) && c.attention_factor.has_value()) {
    scaling["attention_factor"] = json(*c.attention_factor);
  }
  entries["rope_theta"] = json(c.theta);
  entries["rope_scaling"] = c.scaling == RotaryScaling::none ? JsonValue{} : JsonValue{scaling};
  scaling["rope_theta"] = json(c.theta);
  entries["rope_parameters"] = {scaling};
}

JsonValue::Object entries_of(const nn::LlamaConfig& c) {
  const char* type = "llama";
  const char* model = "LlamaForCausalLM";
  if (c.qk_norm) {
    type = "qwen3";
    model = "Qwen3ForCausalLM";
  } else if (c.qkv_bias && !c.output_bias) {
    type = "qwen2";
    model = "Qwen2ForCausalLM";
  }
  const bool is_qwen2 = std::string_view(type) == "qwen2";
  check((is_qwen2 || c.qkv_bias == c.output_bias) && (!c.mlp_bias || std::string_view(type) == "llama"),
        "save_pretrained: transformers has no model with these biases");
  const bool is_smollm3 = !c.rotated_layers.empty();
  if (is_smollm3) {
    check(std::string_view(type) == "llama",
          "save_pretrained: transformers has no Qwen with layers without rotary embeddings");
    type = "smollm3";
    model = "SmolLM3ForCausalLM";
  }
  check(
      c.rotary.scaling != nn::RotaryScaling::dynamic || c.rotary.original_context == c.context,
      "save_pretrained: transformers has no dynamic scaling from an original context of {} other than the context, {}",
      c.rotary.original_context, c.context);
  JsonValue::Object entries{{"model_type", json(std::string(type))},
                            {"architectures", list(model)},
                            {"vocab_size", json(c.vocab)},
                            {"max_position_embeddings", json(c.context)},
                            {"num_hidden_layers", json(c.layers)},
                            {"num_attention_heads", json(c.heads)},
                            {"num_key_value_heads", json(c.key_heads)},
                            {"head_dim", json(c.head_width > 0 ? c.head_width : c.width / c.heads)},
                            {"hidden_size", json(c.width)},
                            {"intermediate_size", json(c.hidden)},
                            {"hidden_act", json(std::string("silu"))},
                            {"rms_norm_eps", json(c.norm_eps)},
                            {"attention_dropout", json(c.dropout)},
                            {"tie_word_embeddings", json(c.tied_head)},
                            {"use_sliding_window", json(false)},
                            {"sliding_window", {}},
                            {"bos_token_id", {}},
                            {"eos_token_id", {}}};
  if (!is_qwen2) {
    entries["attention_bias"] = json(c.qkv_bias);
  }
  if (is_smollm3) {
    entries["pad_token_id"] = {};  // transformers' default is a token that smaller vocabularies do not have
    entries["no_rope_layers"] = list(std::vector<std::int64_t>(c.rotated_layers.begin(), c.rotated_layers.end()));
  }
  if (is_smollm3 || std::string_view(type) == "llama") {
    entries["mlp_bias"] = json(c.mlp_bias);
  }
  add_rotary_entries(entries, c.rotary);
  return entries;
}

JsonValue::Object entries_of(const nn::BertConfig& c) {
  return {{"model_type", json(std::string("bert"))},
          {"architectures", list("BertModel")},
          {"vocab_size", json(c.vocab)},
          {"max_position_embeddings", json(c.context)},
          {"type_vocab_size", json(c.types)},
          {"num_hidden_layers", json(c.layers)},
          {"num_attention_heads", json(c.heads)},
          {"hidden_size", json(c.width)},
          {"intermediate_size", json(c.hidden)},
          {"hidden_act",
           json(c.activation == Activation::gelu_tanh && c.gelu_pytorch_tanh ? kPytorchTanh
                                                                             : name_of(c.activation, kActivations))},
          {"layer_norm_eps", json(c.norm_eps)},
          {"hidden_dropout_prob", json(c.dropout)},
          {"attention_probs_dropout_prob", json(c.attention_dropout)},
          {"position_embedding_type", json(std::string("absolute"))}};
}

std::int64_t count_of(const nn::GPTConfig& c) {
  const std::int64_t block = 12 * c.width * c.width + (c.bias ? 13 : 2) * c.width;
  return (c.vocab + c.context) * c.width + c.layers * block + (c.bias ? 2 : 1) * c.width;
}

std::int64_t count_of(const nn::LlamaConfig& c) {
  const std::int64_t head_width = c.head_width > 0 ? c.head_width : c.width / c.heads;
  const std::int64_t queries = c.heads * head_width, keys = c.key_heads * head_width;
  const std::int64_t block = 2 * c.width * (queries + keys) + (c.qkv_bias ? queries + 2 * keys : 0) +
                             (c.output_bias ? c.width : 0) + (c.qk_norm ? 2 * head_width : 0) + 3 * c.width * c.hidden +
                             (c.mlp_bias ? 2 * c.hidden + c.width : 0) + 2 * c.width;
  return (c.tied_head ? 1 : 2) * c.vocab * c.width + c.layers * block + c.width;
}

std::int64_t count_of(const nn::BertConfig& c) {
  const std::int64_t block = 4 * c.width * c.width + 2 * c.width * c.hidden + 9 * c.width + c.hidden;
  return (c.vocab + c.context + c.types + 2) * c.width + c.layers * block + (c.pooler ? (c.width + 1) * c.width : 0);
}

}  // namespace

PretrainedConfig pretrained_config(const JsonValue& json, const std::string& what) {
  const Entries c(json, what);
  const std::string type = c.text("model_type");
  check(!c.has("quantization_config"),
        "{}: \"quantization_config\": mica reads no quantized checkpoints but GGUF files", what);
  check(!c.has("per_layer_config"), "{}: \"per_layer_config\": mica's models have layers of one configuration", what);
  if (type == "gpt2") {
    return gpt_config(c);
  }
  if (type == "llama" || type == "mistral" || type == "qwen2" || type == "qwen3" || type == "smollm3") {
    return llama_config(c, type);
  }
  if (type == "bert") {
    return bert_config(c);
  }
  c.refuse("model_type", "one of \"gpt2\", \"llama\", \"mistral\", \"qwen2\", \"qwen3\", \"smollm3\", \"bert\"");
}

JsonValue::Object config_entries(const PretrainedConfig& config) {
  return std::visit([](const auto& c) { return entries_of(c); }, config);
}

std::int64_t parameter_count(const PretrainedConfig& config) {
  return std::visit([](const auto& c) { return count_of(c); }, config);
}

std::map<std::string, std::string> weight_map(const JsonValue& index, const std::string& what) {
  const JsonValue* const map = index.find("weight_map");
  check(map != nullptr && map->as<JsonValue::Object>() != nullptr, "{}: \"weight_map\" is missing or not an object",
        what);
  std::map<std::string, std::string> result;
  for (const auto& [tensor, value] : *map->as<JsonValue::Object>()) {
    const auto* const file = value.as<std::string>();
    check(file != nullptr, "{}: the file of \"{}\" is not a text", what, tensor);
    // A path could lead outside the folder.
    check(file->ends_with(".safetensors") && file->find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
          "{}: the file of \"{}\" is \"{}\", expected the name of a safetensors file in the same folder", what, tensor,
          *file);
    result.emplace(tensor, *file);
  }
  return result;
}

}  // namespace mica::io
