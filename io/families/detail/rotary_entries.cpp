#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/families/detail/layer_types.h>
#include <mica/io/families/detail/rotary_entries.h>

namespace mica::io::detail {

namespace {

constexpr const char* kPartialFactor = "partial_rotary_factor";
constexpr const char* kOriginal = "original_max_position_embeddings";

constexpr std::array<std::pair<std::string_view, nn::RotaryScaling>, 7> kScalings{{
    {"default", nn::RotaryScaling::none},
    {"linear", nn::RotaryScaling::linear},
    {"dynamic", nn::RotaryScaling::dynamic},
    {"yarn", nn::RotaryScaling::yarn},
    {"llama3", nn::RotaryScaling::llama3},
    {"longrope", nn::RotaryScaling::longrope},
    {"su", nn::RotaryScaling::longrope},  // its first name
}};

// Throws unless whole heads are rotated, or a part of them with Phi 3: 0, or the width of that part.
std::int64_t rotated_part(const ConfigEntries& c, double factor, std::int64_t head_width, bool is_phi3) {
  const double own = c.number(kPartialFactor, 0, factor);
  if (!is_phi3 && own != 1) {
    c.refuse(kPartialFactor, "1: mica rotates whole heads of such models");
  }
  const auto width = static_cast<std::int64_t>(static_cast<double>(head_width) * std::min(own, 1.0));
  if (own > 1 || width < 2 || width % 2 != 0) {
    c.refuse(kPartialFactor,
             fmt::format("a part of the {} columns of a head: an even number of at least 2", head_width));
  }
  return width == head_width ? 0 : width;
}

// The least factor for a part of a head, which is rounded down when it is read.
double partial_factor(std::int64_t width, std::int64_t head_width) {
  const double factor = static_cast<double>(width) / static_cast<double>(head_width);
  return factor * static_cast<double>(head_width) < static_cast<double>(width) ? std::nextafter(factor, 1.0) : factor;
}

}  // namespace

// transformers 5 writes rope_parameters, with rope_theta in it; older versions write rope_theta and rope_scaling. If
// both are there, transformers 5 takes rope_scaling.
nn::RotaryConfig rotary_config(const ConfigEntries& c, std::int64_t context, std::int64_t head_width,
                               double default_theta, bool is_phi3) {
  const std::optional<ConfigEntries> older = c.nested("rope_scaling"), newer = c.nested("rope_parameters");
  const std::optional<ConfigEntries>& parameters = older.has_value() && !older->is_empty() ? older : newer;
  nn::RotaryConfig result{.theta = c.number("rope_theta", kLeastTheta, default_theta)};
  result.width = rotated_part(c, 1, head_width, is_phi3);
  if (!parameters.has_value()) {
    return result;
  }
  result.width = rotated_part(*parameters, c.number(kPartialFactor, 0, 1.0), head_width, is_phi3);
  const ConfigEntries& p = *parameters;
  p.refuse_nested("one rotary embedding for all kinds of layers: mica has no other");
  result.theta = p.number("rope_theta", kLeastTheta, result.theta);
  result.scaling = p.choice(p.has("rope_type") || !p.has("type") ? "rope_type" : "type", "default", kScalings);
  using nn::RotaryScaling;
  if (is_phi3 && result.scaling == RotaryScaling::yarn) {
    result.scaling = RotaryScaling::longrope;  // its name in the first files
  }
  if (result.scaling == RotaryScaling::none) {
    return result;
  }
  if (is_phi3 && result.scaling != RotaryScaling::longrope) {
    p.refuse(p.has("rope_type") ? "rope_type" : "type", "\"default\" or \"longrope\"");
  }
  result.recompute = is_phi3;
  constexpr double kLeast = 1e-6;
  const bool is_yarn = result.scaling == RotaryScaling::yarn, is_longrope = result.scaling == RotaryScaling::longrope;
  // Dynamic scaling starts from max_position_embeddings, even if there is original_max_position_embeddings. The others
  // prefer the entry outside the object, where Phi-3 has it.
  const bool has_context = is_yarn || is_longrope || result.scaling == RotaryScaling::llama3;
  result.original_context = is_phi3       ? c.count(kOriginal, 1, kMostPositions, 4096)
                            : has_context ? (c.has(kOriginal) ? c : p).count(kOriginal, 1, kMostPositions, context)
                                          : context;
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
    const std::int64_t width = result.width > 0 ? result.width : head_width;
    result.short_factors = p.numbers("short_factor", width / 2);
    result.long_factors = p.numbers("long_factor", width / 2);
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

void add_rotary_entries(JsonValue::Object& entries, const nn::RotaryConfig& c, std::int64_t context,
                        std::int64_t head_width, bool is_phi3) {
  check(
      c.scaling != nn::RotaryScaling::dynamic || c.original_context == context,
      "save_pretrained: transformers has no dynamic scaling from an original context of {} other than the context, {}",
      c.original_context, context);
  JsonValue::Object scaling{{"rope_type", json(name_of(c.scaling, kScalings))}};
  using nn::RotaryScaling;
  if (c.scaling != RotaryScaling::none) {
    scaling["factor"] = json(c.factor);
  }
  const bool is_longrope = c.scaling == RotaryScaling::longrope;
  if (c.scaling == RotaryScaling::yarn || c.scaling == RotaryScaling::llama3 || is_longrope) {
    scaling[kOriginal] = json(c.original_context);
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
    scaling["short_factor"] = json_list(c.short_factors);
    scaling["long_factor"] = json_list(c.long_factors);
  }
  if ((c.scaling == RotaryScaling::yarn || is_longrope) && c.attention_factor.has_value()) {
    scaling["attention_factor"] = json(*c.attention_factor);
  }
  if (is_longrope && is_phi3) {
    entries[kOriginal] = json(c.original_context);
  }
  if (c.width > 0 && c.width < head_width) {
    entries[kPartialFactor] = scaling[kPartialFactor] = json(partial_factor(c.width, head_width));
  }
  entries["rope_theta"] = json(c.theta);
  entries["rope_scaling"] = c.scaling == RotaryScaling::none ? JsonValue{} : JsonValue{scaling};
  scaling["rope_theta"] = json(c.theta);
  entries["rope_parameters"] = {scaling};
}

nn::RotaryConfig rotary_config_of(const ConfigEntries& c, const char* kind, bool scaled, std::int64_t context,
                                  std::int64_t head_width, double default_theta) {
  const std::optional<ConfigEntries> both = c.nested("rope_parameters"), older = c.nested("rope_scaling");
  JsonValue::Object own;
  if (both.has_value() && both->nested(kind).has_value()) {
    own["rope_parameters"] = *both->find(kind);
  }
  if (scaled && older.has_value()) {
    own["rope_scaling"] = *c.find("rope_scaling");
  }
  return rotary_config(ConfigEntries({own}, fmt::format("{} for \"{}\"", c.what(), kind)), context, head_width,
                       default_theta);
}

void add_rotary_entries_of_kinds(JsonValue::Object& entries, const nn::RotaryConfig& full,
                                 const nn::RotaryConfig& windowed, std::int64_t context, std::int64_t head_width) {
  JsonValue::Object local;
  add_rotary_entries(local, windowed, context, head_width);
  add_rotary_entries(entries, full, context, head_width);
  entries["rope_parameters"] = {
      JsonValue::Object{{kFullLayer, entries.at("rope_parameters")}, {kWindowedLayer, local.at("rope_parameters")}}};
}

void add_gguf_rotary(GgufMetadata& metadata, const std::string& architecture, const nn::RotaryConfig& c,
                     std::int64_t head_width) {
  using nn::RotaryScaling;
  check(c.scaling != RotaryScaling::dynamic, "save_gguf: llama.cpp has no dynamic scaling of rotary embeddings");
  const nn::RotaryConfig usual{.scaling = RotaryScaling::yarn, .factor = c.factor};
  const bool is_yarn = c.scaling == RotaryScaling::yarn;
  check(!is_yarn || (c.beta_fast == usual.beta_fast && c.beta_slow == usual.beta_slow && c.truncate &&
                     nn::rotary_scale(c) == nn::rotary_scale(usual)),
        "save_gguf: expected yarn scaling with its usual parameters: beta_fast 32, beta_slow 1, truncate, and no "
        "attention factor");
  const auto key = [&](const char* name) { return architecture + ".rope." + name; };
  metadata[key("dimension_count")] = static_cast<std::uint32_t>(c.width > 0 ? c.width : head_width);
  metadata[key("freq_base")] = static_cast<float>(c.theta);
  if (is_yarn || c.scaling == RotaryScaling::linear) {
    metadata[key("scaling.type")] = std::string(is_yarn ? "yarn" : "linear");
    metadata[key("scaling.factor")] = static_cast<float>(c.factor);
  }
  if (is_yarn) {
    metadata[key("scaling.original_context_length")] = static_cast<std::uint32_t>(c.original_context);
  }
}

JsonValue::Object gguf_rotary_entries(const GgufSource& source) {
  JsonValue::Object rotary{{"rope_theta", {source.number(source.key("rope.freq_base")).value_or(10000)}}};
  // As llama.cpp reads them: the type is linear if it is missing, the factor has an older name, too, and 0 stands
  // for 1.
  std::string type = "linear";
  if (source.has(source.key("rope.scaling.type"))) {
    type = source.text(source.key("rope.scaling.type"));
  }
  if (type == "longrope" && source.architecture() == "phi3") {
    type = "none";  // its factors are in tensors
  }
  check(type == "none" || type == "linear" || type == "yarn",
        "{}: expected \"{}\" to be none, linear or yarn, got \"{}\"", source.what(), source.key("rope.scaling.type"),
        type);
  std::optional<double> factor = source.number(source.key("rope.scaling.factor"));
  if (!factor) {
    factor = source.number(source.key("rope.scale_linear"));
  }
  if (factor.value_or(0) == 0) {
    factor = 1;
  }
  if (type == "linear" && *factor == 1) {
    type = "none";
  }
  rotary["rope_type"] = {type == "none" ? "default" : type};
  if (type != "none") {
    rotary["factor"] = {*factor};
    if (const auto original = source.integer(source.key("rope.scaling.original_context_length"))) {
      rotary["original_max_position_embeddings"] = {*original};
    }
  }
  return rotary;
}

}  // namespace mica::io::detail
