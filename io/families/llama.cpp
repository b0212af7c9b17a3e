#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/families/detail/layer_types.h>
#include <mica/io/families/detail/rotary_entries.h>
#include <mica/ops/view/view.h>

// Llama, Mistral, SmolLM, Qwen 2 to 3, Phi 3 and 4, Granite and OLMo 2.

namespace mica::io::detail {

namespace {

// Which layers of SmolLM 3 have rotary embeddings.
std::vector<bool> rotated_layers(const ConfigEntries& c, std::int64_t layers) {
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

std::int64_t head_width_of(const nn::LlamaConfig& c) { return c.head_width > 0 ? c.head_width : c.width / c.heads; }

double attention_scale_of(const nn::LlamaConfig& c) {
  return c.attention_scale.value_or(1 / std::sqrt(static_cast<double>(head_width_of(c))));
}

// Attention in windows, after transformers' configurations: all layers of Mistral have the window, which is 4,096 if
// the entry is missing, and those of Phi 3, where it is none; in those of Qwen and SmolLM it must be asked for. Llama,
// Granite and OLMo 2 have none.
void read_windows(const ConfigEntries& c, const std::string& type, nn::LlamaConfig& result) {
  constexpr std::int64_t kDefault = 4096;
  const std::string name = "sliding_window";
  const auto window = [&](std::int64_t if_missing) {
    return c.has_key(name) && !c.has(name) ? 0 : c.count(name, 1, kMostPositions, if_missing);
  };
  if (type == "mistral" || type == "phi3") {
    result.window = window(type == "mistral" ? kDefault : 0);
    return;
  }
  if (type == "granite" || type == "olmo2") {
    return;
  }
  if (type != "llama" && c.flag("use_sliding_window", false)) {
    result.window = c.has(name) || type != "smollm3" ? window(kDefault) : 0;
  }
  const bool windows = result.window > 0;
  if (c.has("layer_types")) {
    result.windowed_layers =
        read_layer_types(c, result.layers, windows,
                         fmt::format("\"{}\"{} {} times", kFullLayer,
                                     windows ? fmt::format(" or \"{}\"", kWindowedLayer) : "", result.layers));
  } else if (windows) {
    const std::int64_t first = type == "smollm3" ? 0 : c.count("max_window_layers", 0, INT64_MAX, 28);
    for (std::int64_t i = 0; i < result.layers; ++i) {
      result.windowed_layers.push_back(type == "smollm3" ? !result.rotated_layers[static_cast<std::size_t>(i)]
                                                         : i >= first);
    }
  }
  const auto& layers = result.windowed_layers;
  if (std::find(layers.begin(), layers.end(), true) == layers.end()) {
    result.window = 0;
  }
  if (result.window == 0 || std::find(layers.begin(), layers.end(), false) == layers.end()) {
    result.windowed_layers.clear();
  }
}

nn::LlamaConfig llama_config(const ConfigEntries& c, const std::string& type) {
  nn::LlamaConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                         .context = c.count("max_position_embeddings", 1, kMostPositions),
                         .layers = c.count("num_hidden_layers", 0, kMostLayers),
                         .heads = c.count("num_attention_heads", 1, kMostHeads),
                         .width = c.count("hidden_size", 1, kWidest),
                         .hidden = c.count("intermediate_size", 1, 16 * kWidest),
                         .norm_eps = c.number("rms_norm_eps", 0, type == "phi3" || type == "olmo2" ? 1e-5 : 1e-6),
                         .rotary = {},
                         .rotated_layers = {},
                         .tied_head = c.flag("tie_word_embeddings", type == "smollm3")};
  result.key_heads = c.count("num_key_value_heads", 1, kMostHeads, result.heads);
  result.head_width = c.head_width(result.heads, result.key_heads, result.width,
                                   type == "qwen3" ? std::optional<std::int64_t>(128) : std::nullopt);
  result.rotary = rotary_config(c, result.context, result.head_width, type == "smollm3" ? 2e6 : 1e4, type == "phi3");
  result.dropout = c.probability("attention_dropout", 0);
  c.require_text("hidden_act", "silu");
  c.require_flag("is_causal", true);
  if (type == "qwen2") {
    result.qkv_bias = true;
  } else if (type != "mistral" && type != "phi3") {
    result.qkv_bias = result.output_bias = c.flag("attention_bias", false);
  }
  result.mlp_bias = (type == "llama" || type == "smollm3" || type == "granite") && c.flag("mlp_bias", false);
  result.qk_norm = type == "qwen3";
  result.norms_after = result.wide_qk_norm = type == "olmo2";
  result.fused_files = type == "phi3";
  if (type == "phi3" && c.number("resid_pdrop", 0, 0.0) != 0) {
    c.refuse("resid_pdrop", "0: mica has no dropout after the parts of such a block");
  }
  if (type == "granite") {
    constexpr double kLeastScale = 1e-30;
    result.embedding_scale = c.number("embedding_multiplier", kLeastScale, 1.0);
    result.residual_scale = c.number("residual_multiplier", kLeastScale, 1.0);
    result.attention_scale = c.number("attention_multiplier", kLeastScale, 1.0);
    result.logit_divisor = c.number("logits_scaling", kLeastScale, 1.0);
  }
  if (type == "smollm3") {
    result.rotated_layers = rotated_layers(c, result.layers);
  }
  read_windows(c, type, result);
  return result;
}

// What a configuration may have beyond a plain Llama. The values are indices into kFeatures.
enum LlamaFeature {
  kBiases,
  kInputBiases,
  kOutputBias,
  kMlpBiases,
  kWindow,
  kSomeWindows,
  kUnrotated,
  kQkNorm,
  kWideQkNorm,
  kNormsAfter,
  kScales,
  kFused,
  kPartial,
  kRecompute
};

struct NamedFeature {
  std::string_view name;
  bool (*has)(const nn::LlamaConfig&);
};
constexpr std::array<NamedFeature, 14> kFeatures{{
    {"biases of attention", [](const nn::LlamaConfig& c) { return c.qkv_bias && c.output_bias; }},
    {"qkv_bias alone", [](const nn::LlamaConfig& c) { return c.qkv_bias && !c.output_bias; }},
    {"output_bias alone", [](const nn::LlamaConfig& c) { return c.output_bias && !c.qkv_bias; }},
    {"mlp_bias", [](const nn::LlamaConfig& c) { return c.mlp_bias; }},
    {"a window", [](const nn::LlamaConfig& c) { return c.window > 0 && c.windowed_layers.empty(); }},
    {"a window in some layers", [](const nn::LlamaConfig& c) { return c.window > 0 && !c.windowed_layers.empty(); }},
    {"rotated_layers", [](const nn::LlamaConfig& c) { return !c.rotated_layers.empty(); }},
    {"qk_norm", [](const nn::LlamaConfig& c) { return c.qk_norm; }},
    {"wide_qk_norm", [](const nn::LlamaConfig& c) { return c.wide_qk_norm; }},
    {"norms_after", [](const nn::LlamaConfig& c) { return c.norms_after; }},
    {"scales",
     [](const nn::LlamaConfig& c) {
       return c.embedding_scale != 1 || c.residual_scale != 1 || c.logit_divisor != 1 || c.attention_scale.has_value();
     }},
    {"fused_files", [](const nn::LlamaConfig& c) { return c.fused_files; }},
    {"partial rotation",
     [](const nn::LlamaConfig& c) { return c.rotary.width > 0 && c.rotary.width < head_width_of(c); }},
    {"RotaryConfig::recompute",
     [](const nn::LlamaConfig& c) { return c.rotary.recompute && c.rotary.scaling == nn::RotaryScaling::longrope; }},
}};

constexpr unsigned feature_bits(std::initializer_list<LlamaFeature> features) {
  unsigned result = 0;
  for (const LlamaFeature feature : features) {
    result |= 1U << feature;
  }
  return result;
}

// A model of transformers: model_type, the features that it has, and those that it may have.
struct LlamaKind {
  std::string_view type;
  const char* model;
  unsigned has, may_have;
};
constexpr std::array<LlamaKind, 8> kLlamaKinds{{
    {"llama", "LlamaForCausalLM", 0, feature_bits({kBiases, kMlpBiases})},
    {"mistral", "MistralForCausalLM", feature_bits({kWindow}), 0},
    {"qwen2", "Qwen2ForCausalLM", feature_bits({kInputBiases}), feature_bits({kWindow, kSomeWindows})},
    {"qwen3", "Qwen3ForCausalLM", feature_bits({kQkNorm}), feature_bits({kBiases, kWindow, kSomeWindows})},
    {"smollm3", "SmolLM3ForCausalLM", feature_bits({kUnrotated}),
     feature_bits({kBiases, kMlpBiases, kWindow, kSomeWindows})},
    {"phi3", "Phi3ForCausalLM", feature_bits({kFused}), feature_bits({kWindow, kPartial, kRecompute})},
    {"granite", "GraniteForCausalLM", feature_bits({kScales}), feature_bits({kBiases, kMlpBiases})},
    {"olmo2", "Olmo2ForCausalLM", feature_bits({kWideQkNorm, kNormsAfter}), feature_bits({kBiases})},
}};

// Throws an Error that begins with `op` if there is none.
const LlamaKind& llama_kind_of(const nn::LlamaConfig& c, const char* op) {
  unsigned features = 0;
  std::string names;
  for (std::size_t i = 0; i < kFeatures.size(); ++i) {
    if (kFeatures[i].has(c)) {
      features |= 1U << i;
      names += fmt::format("{}{}", names.empty() ? "" : ", ", kFeatures[i].name);
    }
  }
  for (const LlamaKind& kind : kLlamaKinds) {
    if ((features & kind.has) == kind.has && (features & ~(kind.has | kind.may_have)) == 0) {
      check(
          kind.type != "phi3" || c.rotary.scaling == nn::RotaryScaling::none ||
              (c.rotary.scaling == nn::RotaryScaling::longrope && c.rotary.recompute &&
               head_width_of(c) * c.heads == c.width),
          "{}: transformers has no Phi 3 with scaled rotary embeddings but longrope, with RotaryConfig::recompute and "
          "heads that together are as wide as the model",
          op);
      return kind;
    }
  }
  fail("{}: transformers has no model with just this: {}", op, names);
}

JsonValue::Object llama_entries(const nn::LlamaConfig& c) {
  const LlamaKind& kind = llama_kind_of(c, "save_pretrained");
  const std::int64_t head_width = head_width_of(c);
  const bool is_phi3 = kind.type == "phi3";
  JsonValue::Object entries{{"model_type", json(std::string(kind.type))},
                            {"architectures", json_list(kind.model)},
                            {"vocab_size", json(c.vocab)},
                            {"max_position_embeddings", json(c.context)},
                            {"num_hidden_layers", json(c.layers)},
                            {"num_attention_heads", json(c.heads)},
                            {"num_key_value_heads", json(c.key_heads)},
                            {"head_dim", json(head_width)},
                            {"hidden_size", json(c.width)},
                            {"intermediate_size", json(c.hidden)},
                            {"hidden_act", json(std::string("silu"))},
                            {"rms_norm_eps", json(c.norm_eps)},
                            {"attention_dropout", json(c.dropout)},
                            {"tie_word_embeddings", json(c.tied_head)},
                            {"use_sliding_window", json(c.window > 0)},
                            {"sliding_window", c.window > 0 ? json(c.window) : JsonValue{}},
                            {"bos_token_id", {}},
                            {"eos_token_id", {}}};
  const auto may_have = [&](LlamaFeature feature) { return ((kind.may_have >> feature) & 1U) != 0; };
  if (c.window > 0 && may_have(kSomeWindows)) {
    entries["layer_types"] = layer_types(
        c.windowed_layers.empty() ? std::vector<bool>(static_cast<std::size_t>(c.layers), true) : c.windowed_layers);
  }
  if (kind.type != "qwen2") {
    entries["attention_bias"] = json(c.qkv_bias);
  }
  if (may_have(kMlpBiases)) {
    entries["mlp_bias"] = json(c.mlp_bias);
  }
  if (kind.type == "smollm3") {
    entries["no_rope_layers"] = json_list(std::vector<std::int64_t>(c.rotated_layers.begin(), c.rotated_layers.end()));
  }
  if (kind.type == "smollm3" || is_phi3 || kind.type == "olmo2") {
    entries["pad_token_id"] = {};  // transformers' default is a token that smaller vocabularies do not have
  }
  if (kind.type == "granite") {
    entries["embedding_multiplier"] = json(c.embedding_scale);
    entries["residual_multiplier"] = json(c.residual_scale);
    entries["attention_multiplier"] = json(attention_scale_of(c));
    entries["logits_scaling"] = json(c.logit_divisor);
  }
  add_rotary_entries(entries, c.rotary, c.context, head_width, is_phi3);
  return entries;
}

std::int64_t llama_parameters(const nn::LlamaConfig& c) {
  const std::int64_t head_width = head_width_of(c);
  const std::int64_t queries = c.heads * head_width, keys = c.key_heads * head_width;
  const std::int64_t qk_norms = c.wide_qk_norm ? queries + keys : c.qk_norm ? 2 * head_width : 0;
  const std::int64_t block = 2 * c.width * (queries + keys) + (c.qkv_bias ? queries + 2 * keys : 0) +
                             (c.output_bias ? c.width : 0) + qk_norms + 3 * c.width * c.hidden +
                             (c.mlp_bias ? 2 * c.hidden + c.width : 0) + 2 * c.width;
  return (c.tied_head ? 1 : 2) * c.vocab * c.width + c.layers * block + c.width;
}

// The divisors of the rotary frequencies: llama.cpp's metadata cannot describe Llama 3.1's scaling.
constexpr const char* kFrequencyDivisors = "rope_freqs.weight";
// Of longrope. llama.cpp chooses between them by the size of its context, not by the length of the text.
constexpr std::array<const char*, 2> kLongropeFactors{"rope_factors_long.weight", "rope_factors_short.weight"};

/// Llama 3.1 and later: the parameters that give these divisors. The models differ only in the factor, which is the
/// divisor of the lowest frequencies.
nn::RotaryConfig with_divisors(nn::RotaryConfig rotary, std::int64_t head_width, const std::vector<float>& divisors,
                               const std::string& what) {
  const std::vector<float> plain = nn::rotary_frequencies(head_width, rotary);
  check(rotary.scaling == nn::RotaryScaling::none && divisors.size() == plain.size(),
        "{}: \"{}\" has {} elements for {} frequencies, or the metadata ask for another scaling, too", what,
        kFrequencyDivisors, divisors.size(), plain.size());
  rotary.low_frequency_factor = 1;
  rotary.high_frequency_factor = 4;
  rotary.original_context = 8192;
  // The turns of the lowest frequency. In a narrow head, even that frequency may be divided by less than the factor, or
  // not at all.
  const double turns = static_cast<double>(rotary.original_context) * plain.back() / (2 * std::numbers::pi);
  const double kept = std::clamp((turns - 1) / (4 - 1), 0.0, 1.0);
  rotary.scaling = nn::RotaryScaling::llama3;
  rotary.factor = kept < 1 ? (1 - kept) / (1 / static_cast<double>(divisors.back()) - kept) : 1;
  bool same = rotary.factor > 0 && std::isfinite(rotary.factor);
  if (same) {
    const std::vector<float> scaled = nn::rotary_frequencies(head_width, rotary);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      same = same && std::abs(plain[i] / divisors[i] - scaled[i]) <= 1e-4 * scaled[i];
    }
  }
  check(same, "{}: \"{}\" is not Llama 3's scaling of an original context of 8192", what, kFrequencyDivisors);
  return rotary;
}

// Phi 3: partial rotation, and longrope's factors. The model chooses between them by the length of the text.
void read_phi3_rotary(const GgufSource& source, nn::LlamaConfig& config) {
  nn::RotaryConfig& rotary = config.rotary;
  const std::int64_t width = source.integer(source.key("rope.dimension_count")).value_or(config.head_width);
  check(width >= 2 && width <= config.head_width && width % 2 == 0,
        "{}: expected \"{}\" to be an even number up to the width of a head, {}, got {}", source.what(),
        source.key("rope.dimension_count"), config.head_width, width);
  rotary.width = width == config.head_width ? 0 : width;
  const auto factors = [&](const char* name) {
    const GgufTensor* const tensor = source.tensor(name);
    check(tensor != nullptr && tensor->type == GgufType::f32 &&
              tensor->bytes == 4 * static_cast<std::uint64_t>(width / 2),
          "{}: expected \"{}\" to be {} float32 numbers", source.what(), name, width / 2);
    const std::vector<float> values = source.floats(*tensor);
    return std::vector<double>(values.begin(), values.end());
  };
  if (source.tensor(kLongropeFactors[0]) == nullptr && source.tensor(kLongropeFactors[1]) == nullptr) {
    source.require("rope.scaling.attn_factor", 1);
    return;
  }
  rotary.scaling = nn::RotaryScaling::longrope;
  rotary.recompute = true;
  rotary.long_factors = factors(kLongropeFactors[0]);
  rotary.short_factors = factors(kLongropeFactors[1]);
  rotary.original_context = source.count("rope.scaling.original_context_length");
  rotary.factor = static_cast<double>(config.context) / static_cast<double>(rotary.original_context);
  rotary.attention_factor = source.number(source.key("rope.scaling.attn_factor"));
}

nn::LlamaConfig llama_config_of_gguf(const GgufSource& source) {
  const std::string& what = source.what();
  const std::string architecture = source.architecture();
  const bool is_phi3 = architecture == "phi3", is_granite = architecture == "granite";
  source.require_plain();
  const auto number_or = [&](const char* name, double absent) {
    const double value = source.number(source.key(name)).value_or(0);
    return value == 0 ? absent : value;  // 0 stands for no scale, too
  };
  if (!is_phi3) {
    source.require("attention.sliding_window", 0);
    source.require("rope.scaling.attn_factor", 1);
    for (const char* const name : kLongropeFactors) {
      check(source.tensor(name) == nullptr, "{}: it has \"{}\", and mica reads longrope scaling from config.json only",
            what, name);
    }
  }
  if (!is_granite) {
    source.require("attention.scale", 0);
    for (const char* const name : {"embedding_scale", "residual_scale", "logit_scale"}) {
      source.require(name, 1);
    }
  }
  const std::int64_t width = source.count("embedding_length"), heads = source.count("attention.head_count");
  JsonValue::Object json{
      {"model_type", {architecture}},
      {"vocab_size", {source.vocabulary()}},
      {"max_position_embeddings", {source.count("context_length")}},
      {"num_hidden_layers", {source.count("block_count")}},
      {"num_attention_heads", {heads}},
      {"num_key_value_heads", {source.integer(source.key("attention.head_count_kv")).value_or(heads)}},
      {"hidden_size", {width}},
      {"intermediate_size", {source.count("feed_forward_length")}},
      {"hidden_act", {"silu"}},
      {"rms_norm_eps", {source.real("attention.layer_norm_rms_epsilon")}},
      {"tie_word_embeddings", {source.tensor(kGgufHead) == nullptr}},
      {"attention_bias", {architecture != "qwen2" && source.tensor("blk.0.attn_q.bias") != nullptr}},
      {"mlp_bias", {source.tensor("blk.0.ffn_gate.bias") != nullptr}},
      {"rope_parameters", {gguf_rotary_entries(source)}}};
  if (const auto head_width = source.integer(source.key("attention.key_length"))) {
    json["head_dim"] = {*head_width};
    source.require("attention.value_length", static_cast<double>(*head_width));
  } else if (heads > 0 && width % heads == 0) {
    json["head_dim"] = {width / heads};
  }
  if (is_granite) {
    json["embedding_multiplier"] = {number_or("embedding_scale", 1)};
    json["residual_multiplier"] = {number_or("residual_scale", 1)};
    json["logits_scaling"] = {number_or("logit_scale", 1)};
    const auto head_width = json.find("head_dim");
    json["attention_multiplier"] = {number_or(
        "attention.scale",
        head_width == json.end() ? 1 : 1 / std::sqrt(static_cast<double>(*head_width->second.as<std::int64_t>())))};
  }
  if (const auto window = source.integer(source.key("attention.sliding_window")); window.value_or(0) != 0) {
    json["sliding_window"] = {*window};
  }
  nn::LlamaConfig config = llama_config(ConfigEntries({json}, what + ": as a config.json"), architecture);
  if (is_phi3) {
    read_phi3_rotary(source, config);
  } else {
    source.require("rope.dimension_count", static_cast<double>(config.head_width));
  }
  if (const GgufTensor* const divisors = source.tensor(kFrequencyDivisors)) {
    check(divisors->type == GgufType::f32 && divisors->bytes <= 4 * static_cast<std::uint64_t>(config.head_width),
          "{}: expected \"{}\" to be float32 and as long as half a head", what, kFrequencyDivisors);
    config.rotary = with_divisors(config.rotary, config.head_width, source.floats(*divisors), what);
  }
  return config;
}

std::string llama_architecture(const nn::LlamaConfig& c) {
  if (c.fused_files || c.norms_after || kFeatures[kScales].has(c)) {
    return c.fused_files ? "phi3" : c.norms_after ? "olmo2" : "granite";
  }
  return c.qk_norm ? "qwen3" : c.qkv_bias && !c.output_bias ? "qwen2" : "llama";
}

/// For the architectures llama and granite, llama.cpp rotates neighboring elements of a head, (0, 1), (2, 3), …, while
/// Hugging Face rotates elements half a head apart. So the rows of q and k are reordered, from halves (heads, 2, D/2)
/// to pairs (heads, D/2, 2) or back. The rows of others keep their order.
Tensor reordered_rows(const nn::LlamaConfig& c, std::string_view architecture, std::string_view name, const Tensor& x,
                      bool to_pairs) {
  const bool is_key = name.find(".k_proj.") != std::string::npos;
  const std::int64_t heads = is_key ? c.key_heads : c.heads;
  // No model has q or k of another shape; these are rejected later.
  if ((architecture != "llama" && architecture != "granite") ||
      (!is_key && name.find(".q_proj.") == std::string::npos) || x.dim() < 1 || x.dim() > 2 ||
      x.size(0) % (2 * heads) != 0) {
    return x;
  }
  const std::int64_t half = x.size(0) / heads / 2, columns = x.dim() == 2 ? x.size(1) : 1;
  const Shape apart = to_pairs ? Shape{heads, 2, half, columns} : Shape{heads, half, 2, columns};
  return reshape(transpose(reshape(x, apart), 1, 2), x.shape());
}

GgufMetadata llama_gguf(const nn::LlamaConfig& c) {
  const std::string architecture = llama_architecture(c);
  const bool is_phi3 = architecture == "phi3";
  if (is_phi3 || architecture == "granite" || architecture == "olmo2") {
    check(llama_kind_of(c, "save_gguf").type == architecture && (architecture != "olmo2" || !c.qkv_bias),
          "save_gguf: llama.cpp has no {} with these options", architecture);
  }
  for (const LlamaFeature feature : {kWideQkNorm, kPartial}) {
    check(!kFeatures[feature].has(c) || is_phi3 || architecture == "olmo2", "save_gguf: llama.cpp's {} has no {}",
          architecture, kFeatures[feature].name);
  }
  check(is_phi3 || c.rotary.scaling != nn::RotaryScaling::longrope,
        "save_gguf: llama.cpp chooses longrope's factors by the size of its context, and not by the length of the "
        "text");
  check(std::find(c.rotated_layers.begin(), c.rotated_layers.end(), false) == c.rotated_layers.end(),
        "save_gguf: the architecture llama has rotary embeddings in all layers");
  check(is_phi3 || c.window == 0, "save_gguf: llama.cpp's {} has no attention in windows", architecture);
  check(c.rotary.scaling != nn::RotaryScaling::llama3 ||
            (c.rotary.low_frequency_factor == 1 && c.rotary.high_frequency_factor == 4 &&
             c.rotary.original_context == 8192),
        "save_gguf: expected Llama 3's scaling with its usual parameters 1, 4 and 8192");
  const auto key = [&](const char* name) { return architecture + "." + name; };
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  const std::int64_t head_width = head_width_of(c);
  GgufMetadata metadata{{"general.architecture", architecture},
                        {key("vocab_size"), count(c.vocab)},
                        {key("context_length"), count(c.context)},
                        {key("block_count"), count(c.layers)},
                        {key("embedding_length"), count(c.width)},
                        {key("feed_forward_length"), count(c.hidden)},
                        {key("attention.head_count"), count(c.heads)},
                        {key("attention.head_count_kv"), count(c.key_heads)},
                        {key("attention.key_length"), count(head_width)},
                        {key("attention.value_length"), count(head_width)},
                        {key("attention.layer_norm_rms_epsilon"), static_cast<float>(c.norm_eps)}};
  add_gguf_rotary(metadata, architecture, c.rotary, head_width);
  if (is_phi3) {
    metadata[key("attention.sliding_window")] = count(c.window);
    if (c.rotary.scaling == nn::RotaryScaling::longrope) {
      metadata[key("rope.scaling.original_context_length")] = count(c.rotary.original_context);
      metadata[key("rope.scaling.attn_factor")] = static_cast<float>(nn::rotary_scale(c.rotary));
    }
  }
  if (architecture == "granite") {
    metadata[key("embedding_scale")] = static_cast<float>(c.embedding_scale);
    metadata[key("residual_scale")] = static_cast<float>(c.residual_scale);
    metadata[key("logit_scale")] = static_cast<float>(c.logit_divisor);
    metadata[key("attention.scale")] = static_cast<float>(attention_scale_of(c));
  }
  return metadata;
}

/// Llama 3's scaling as a tensor of divisors, and Phi 3's as two.
StateDict frequency_divisors(const nn::LlamaConfig& c) {
  if (c.rotary.scaling == nn::RotaryScaling::longrope) {
    const auto factors = [](const std::vector<double>& list) {
      return from_data(std::vector<float>(list.begin(), list.end()), {static_cast<std::int64_t>(list.size())});
    };
    return {{kLongropeFactors[0], factors(c.rotary.long_factors)},
            {kLongropeFactors[1], factors(c.rotary.short_factors)}};
  }
  if (c.rotary.scaling != nn::RotaryScaling::llama3) {
    return {};
  }
  const std::int64_t head_width = head_width_of(c);
  nn::RotaryConfig plain = c.rotary;
  plain.scaling = nn::RotaryScaling::none;
  std::vector<float> divisors = nn::rotary_frequencies(head_width, plain);
  const std::vector<float> scaled = nn::rotary_frequencies(head_width, c.rotary);
  for (std::size_t i = 0; i < divisors.size(); ++i) {
    divisors[i] /= scaled[i];
  }
  return {{kFrequencyDivisors, from_data(divisors, {head_width / 2})}};
}

// Phi 3.
std::vector<FusedRows> llama_fused_rows(const nn::LlamaConfig& c) {
  if (!c.fused_files) {
    return {};
  }
  const std::int64_t queries = c.heads * head_width_of(c), keys = c.key_heads * head_width_of(c);
  return {
      {"self_attn.qkv_proj", {{"self_attn.q_proj", queries}, {"self_attn.k_proj", keys}, {"self_attn.v_proj", keys}}},
      {"mlp.gate_up_proj", {{"mlp.gate_proj", c.hidden}, {"mlp.up_proj", c.hidden}}}};
}

bool has_tied_llama_head(const nn::LlamaConfig& c) { return c.tied_head; }

constexpr std::array<std::string_view, 8> kLlamaTypes{"llama",   "mistral", "qwen2",   "qwen3",
                                                      "smollm3", "phi3",    "granite", "olmo2"};
constexpr std::array<std::string_view, 6> kLlamaArchitectures{"llama", "qwen2", "qwen3", "phi3", "granite", "olmo2"};
constexpr std::array<std::string_view, 1> kLlamaObsolete{".rotary_emb.inv_freq"};

constexpr std::array<Names, 6> kLlamaOutside{{
    {kGgufEmbedding, "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {kGgufHead, "lm_head.weight"},
    {kFrequencyDivisors, ""},
    {kLongropeFactors[0], ""},
    {kLongropeFactors[1], ""},
}};
constexpr std::array<Names, 11> kLlamaInside{{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
}};
constexpr std::array<Names, 2> kPhi3Inside{{
    {"attn_qkv", "self_attn.qkv_proj"},
    {"ffn_up", "mlp.gate_up_proj"},
}};
constexpr std::array<Names, 2> kOlmo2Inside{{
    {"post_attention_norm", "post_attention_layernorm"},
    {"post_ffw_norm", "post_feedforward_layernorm"},
}};
constexpr std::array<GgufFamily<nn::LlamaConfig>::Own, 2> kLlamaOwn{{{"phi3", kPhi3Inside}, {"olmo2", kOlmo2Inside}}};

}  // namespace

template <>
const ModelFamily<nn::Llama>& family() {
  static constexpr ModelFamily<nn::Llama> value{
      .types = kLlamaTypes,
      .read = llama_config,
      .write = llama_entries,
      .parameter_count = llama_parameters,
      .tensors = {.own_prefix = "model.", .embedding = "model.embed_tokens.weight", .obsolete = kLlamaObsolete},
      .has_tied_head = has_tied_llama_head,
      .fused_rows = llama_fused_rows,
      .adapter_task = "CAUSAL_LM",
      .gguf = {.architectures = kLlamaArchitectures,
               .block = {"blk.", "model.layers."},
               .outside = kLlamaOutside,
               .inside = kLlamaInside,
               .own = kLlamaOwn,
               .read = llama_config_of_gguf,
               .write = llama_gguf,
               .converted = reordered_rows,
               .config_tensors = frequency_divisors}};
  return value;
}

}  // namespace mica::io::detail
