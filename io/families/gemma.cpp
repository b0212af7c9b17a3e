#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/families/detail/layer_types.h>
#include <mica/io/families/detail/rotary_entries.h>
#include <mica/ops/elementwise/binary.h>

// Gemma 2 and 3.

namespace mica::io::detail {

namespace {

// Without the entry, every other layer of Gemma 2 has the window, and five of six of Gemma 3.
std::vector<bool> windowed_layers(const ConfigEntries& c, bool is_gemma3, std::int64_t layers) {
  if (c.has("layer_types")) {
    return read_layer_types(c, layers, /*allows_windows=*/true,
                            fmt::format("\"{}\" or \"{}\" for each of {} layers", kWindowedLayer, kFullLayer, layers));
  }
  const std::int64_t pattern = is_gemma3 ? c.count("sliding_window_pattern", 1, kMostLayers, 6) : 2;
  std::vector<bool> result;
  for (std::int64_t i = 1; i <= layers; ++i) {
    result.push_back(i % pattern != 0);
  }
  return result;
}

// A cap, which is null if there is none.
double cap_of(const ConfigEntries& c, const char* name, double absent) {
  if (!c.has_key(name)) {
    return absent;
  }
  if (c.has(name)) {
    const double cap = c.number(name, 0);
    if (cap == 0) {
      c.refuse(name, "a number above 0, or null for no cap");
    }
    return cap;
  }
  return 0;
}

nn::GemmaConfig gemma_config(const ConfigEntries& c, const std::string& type) {
  const bool is_gemma3 = type == "gemma3_text";
  nn::GemmaConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                         .context = c.count("max_position_embeddings", 1, kMostPositions),
                         .window = c.count("sliding_window", 1, kMostPositions, 4096),
                         .layers = c.count("num_hidden_layers", 0, kMostLayers),
                         .heads = c.count("num_attention_heads", 1, kMostHeads),
                         .key_heads = c.count("num_key_value_heads", 1, kMostHeads, 4),
                         .width = c.count("hidden_size", 1, kWidest),
                         .hidden = c.count("intermediate_size", 1, 16 * kWidest),
                         .norm_eps = c.number("rms_norm_eps", 0, 1e-6),
                         .rotary = {},
                         .query_scale = c.number("query_pre_attn_scalar", 1e-6, 256.0),
                         .attention_cap = cap_of(c, "attn_logit_softcapping", is_gemma3 ? 0 : 50),
                         .logit_cap = cap_of(c, "final_logit_softcapping", is_gemma3 ? 0 : 30),
                         .dropout = c.probability("attention_dropout", 0)};
  c.require_divisor("num_attention_heads", result.heads, "hidden_size", result.width);  // so do transformers
  result.head_width = c.head_width(result.heads, result.key_heads, result.width, 256);
  if (c.has_key("sliding_window") && !c.has("sliding_window")) {
    c.refuse("sliding_window", "a whole number");
  }
  result.windowed_layers = windowed_layers(c, is_gemma3, result.layers);
  result.qk_norm = is_gemma3;
  if (is_gemma3) {
    // In older files, the thetas are outside, and only full layers are scaled.
    result.rotary = rotary_config_of(c, kFullLayer, true, result.context, result.head_width,
                                     c.number("rope_theta", kLeastTheta, 1e6));
    result.local_rotary = rotary_config_of(c, kWindowedLayer, false, result.context, result.head_width,
                                           c.number("rope_local_base_freq", kLeastTheta, 1e4));
  } else {
    result.rotary = rotary_config(c, result.context, result.head_width, 1e4);
  }
  c.require_text("hidden_activation", kPytorchTanh);
  c.require_flag("attention_bias", false);
  c.require_flag("tie_word_embeddings", true);
  c.require_flag("use_bidirectional_attention", false);
  return result;
}

JsonValue::Object gemma_entries(const nn::GemmaConfig& c) {
  const auto cap = [](double value) { return value == 0 ? JsonValue{} : json(value); };
  std::vector<bool> windowed = c.windowed_layers;
  for (std::int64_t i = 0; c.windowed_layers.empty() && i < c.layers; ++i) {
    windowed.push_back(i % 2 == 0);
  }
  check(c.qk_norm == c.local_rotary.has_value(),
        "save_pretrained: transformers has norms of queries and keys together with two rotary embeddings (Gemma 3), or "
        "neither (Gemma 2)");
  // transformers expects a whole number where there is one.
  const auto whole = static_cast<std::int64_t>(c.query_scale);
  JsonValue::Object entries{
      {"model_type", json(std::string(c.qk_norm ? "gemma3_text" : "gemma2"))},
      {"architectures", json_list(c.qk_norm ? "Gemma3ForCausalLM" : "Gemma2ForCausalLM")},
      {"vocab_size", json(c.vocab)},
      {"max_position_embeddings", json(c.context)},
      {"sliding_window", json(c.window)},
      {"layer_types", layer_types(windowed)},
      {"num_hidden_layers", json(c.layers)},
      {"num_attention_heads", json(c.heads)},
      {"num_key_value_heads", json(c.key_heads)},
      {"head_dim", json(c.head_width)},
      {"hidden_size", json(c.width)},
      {"intermediate_size", json(c.hidden)},
      {"hidden_activation", json(std::string(kPytorchTanh))},
      {"hidden_act", json(std::string(kPytorchTanh))},  // the name that older versions read
      {"rms_norm_eps", json(c.norm_eps)},
      {"query_pre_attn_scalar", static_cast<double>(whole) == c.query_scale ? json(whole) : json(c.query_scale)},
      {"attn_logit_softcapping", cap(c.attention_cap)},
      {"final_logit_softcapping", cap(c.logit_cap)},
      {"attention_bias", json(false)},
      {"attention_dropout", json(c.dropout)},
      {"tie_word_embeddings", json(true)},
      {"bos_token_id", {}},
      {"eos_token_id", {}},
      {"pad_token_id", {}}};  // transformers' default is a token that smaller vocabularies do not have
  if (c.local_rotary) {
    add_rotary_entries_of_kinds(entries, c.rotary, *c.local_rotary, c.context, c.head_width);
    entries["rope_local_base_freq"] = json(c.local_rotary->theta);
  } else {
    add_rotary_entries(entries, c.rotary, c.context, c.head_width);
  }
  return entries;
}

std::int64_t gemma_parameters(const nn::GemmaConfig& c) {
  const std::int64_t queries = c.heads * c.head_width, keys = c.key_heads * c.head_width;
  const std::int64_t block =
      2 * c.width * (queries + keys) + 3 * c.width * c.hidden + 4 * c.width + (c.qk_norm ? 2 * c.head_width : 0);
  return c.vocab * c.width + c.layers * block + c.width;
}

// llama.cpp does not store the scale of queries, but tells it from the number of layers.
double gemma2_query_scale(const nn::GemmaConfig& c) {
  constexpr std::int64_t kLayersOf27B = 46;
  return static_cast<double>(c.layers == kLayersOf27B ? c.width / c.heads : c.head_width);
}

nn::GemmaConfig gemma_config_of_gguf(const GgufSource& source) {
  const auto number_or = [&](const char* name, double absent) {
    return source.number(source.key(name)).value_or(absent);
  };
  const JsonValue::Object entries{
      {"vocab_size", {source.vocabulary()}},
      {"max_position_embeddings", {source.count("context_length")}},
      {"sliding_window", {source.integer(source.key("attention.sliding_window")).value_or(4096)}},
      {"num_hidden_layers", {source.count("block_count")}},
      {"num_attention_heads", {source.count("attention.head_count")}},
      {"num_key_value_heads", {source.count("attention.head_count_kv")}},
      {"head_dim", {source.count("attention.key_length")}},
      {"hidden_size", {source.count("embedding_length")}},
      {"intermediate_size", {source.count("feed_forward_length")}},
      {"rms_norm_eps", {source.real("attention.layer_norm_rms_epsilon")}},
      {"attn_logit_softcapping", {number_or("attn_logit_softcapping", 50)}},
      {"final_logit_softcapping", {number_or("final_logit_softcapping", 30)}},
      {"rope_parameters", {gguf_rotary_entries(source)}}};
  nn::GemmaConfig config = gemma_config(ConfigEntries({entries}, source.what() + ": as a config.json"), "gemma2");
  source.require("attention.value_length", static_cast<double>(config.head_width));
  source.require("rope.dimension_count", static_cast<double>(config.head_width));
  config.query_scale = gemma2_query_scale(config);
  return config;
}

GgufMetadata gemma2_gguf(const nn::GemmaConfig& c) {
  check(!c.qk_norm, "save_gguf: Gemma 3 is not supported");
  for (std::size_t i = 0; i < c.windowed_layers.size(); ++i) {
    check(c.windowed_layers[i] == (i % 2 == 0), "save_gguf: llama.cpp's Gemma 2 has a window in every other layer");
  }
  check(c.rotary.scaling == nn::RotaryScaling::none && c.attention_cap > 0 && c.logit_cap > 0,
        "save_gguf: llama.cpp's Gemma 2 has caps, and unscaled rotary embeddings");
  check(c.query_scale == gemma2_query_scale(c), "save_gguf: llama.cpp's Gemma 2 has a query_scale of {}, got {}",
        gemma2_query_scale(c), c.query_scale);
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  return {{"general.architecture", std::string("gemma2")},
          {"gemma2.vocab_size", count(c.vocab)},
          {"gemma2.context_length", count(c.context)},
          {"gemma2.block_count", count(c.layers)},
          {"gemma2.embedding_length", count(c.width)},
          {"gemma2.feed_forward_length", count(c.hidden)},
          {"gemma2.attention.head_count", count(c.heads)},
          {"gemma2.attention.head_count_kv", count(c.key_heads)},
          {"gemma2.attention.key_length", count(c.head_width)},
          {"gemma2.attention.value_length", count(c.head_width)},
          {"gemma2.attention.layer_norm_rms_epsilon", static_cast<float>(c.norm_eps)},
          {"gemma2.attention.sliding_window", count(c.window)},
          {"gemma2.attn_logit_softcapping", static_cast<float>(c.attention_cap)},
          {"gemma2.final_logit_softcapping", static_cast<float>(c.logit_cap)},
          {"gemma2.rope.dimension_count", count(c.head_width)},
          {"gemma2.rope.freq_base", static_cast<float>(c.rotary.theta)}};
}

/// llama.cpp stores 1 + weight for norms.
Tensor shifted_norms(const nn::GemmaConfig&, std::string_view, std::string_view name, const Tensor& tensor,
                     bool to_gguf) {
  if (!name.ends_with("norm.weight")) {
    return tensor;
  }
  const Tensor exact = tensor.dtype() == float64 ? tensor : tensor.to(float32);
  return to_gguf ? exact + 1.0 : exact - 1.0;
}

bool has_gemma_head(const nn::GemmaConfig&) { return true; }  // tied

constexpr std::array<std::string_view, 2> kGemmaTypes{"gemma2", "gemma3_text"};
constexpr std::array<std::string_view, 1> kGemmaArchitectures{"gemma2"};

constexpr std::array<Names, 2> kGemmaOutside{{
    {kGgufEmbedding, "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
}};
constexpr std::array<Names, 11> kGemmaInside{{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"post_attention_norm", "post_attention_layernorm"},
    {"ffn_norm", "pre_feedforward_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
    {"post_ffw_norm", "post_feedforward_layernorm"},
}};

}  // namespace

template <>
const ModelFamily<nn::Gemma>& family() {
  static constexpr ModelFamily<nn::Gemma> value{
      .types = kGemmaTypes,
      .read = gemma_config,
      .write = gemma_entries,
      .parameter_count = gemma_parameters,
      .tensors = {.own_prefix = "model.", .embedding = "model.embed_tokens.weight"},
      .has_tied_head = has_gemma_head,
      .adapter_task = "CAUSAL_LM",
      .gguf = {.architectures = kGemmaArchitectures,
               .block = {"blk.", "model.layers."},
               .outside = kGemmaOutside,
               .inside = kGemmaInside,
               .read = gemma_config_of_gguf,
               .write = gemma2_gguf,
               .converted = shifted_norms}};
  return value;
}

}  // namespace mica::io::detail
