#include <array>
#include <string>
#include <string_view>

#include <mica/core/check.h>
#include <mica/io/families/detail/family.h>
#include <mica/io/families/detail/rotary_entries.h>

// StarCoder 2.

namespace mica::io::detail {

namespace {

std::int64_t starcoder_head_width(const nn::StarcoderConfig& c) {
  return c.head_width > 0 ? c.head_width : c.width / c.heads;
}

nn::StarcoderConfig starcoder_config(const ConfigEntries& c, const std::string&) {
  nn::StarcoderConfig result{.vocab = c.count("vocab_size", 1, kMostTokens),
                             .context = c.count("max_position_embeddings", 1, kMostPositions),
                             .layers = c.count("num_hidden_layers", 0, kMostLayers),
                             .heads = c.count("num_attention_heads", 1, kMostHeads),
                             .key_heads = c.count("num_key_value_heads", 1, kMostHeads, 2),
                             .width = c.count("hidden_size", 1, kWidest),
                             .hidden = c.count("intermediate_size", 1, 16 * kWidest),
                             .norm_eps = c.number("norm_epsilon", 0, 1e-5),
                             .rotary = {},
                             .window = c.count("sliding_window", 1, kMostPositions, 0),
                             .bias = c.flag("use_bias", true),
                             .tied_head = c.flag("tie_word_embeddings", true),
                             .dropout = c.probability("residual_dropout", 0),
                             .attention_dropout = c.probability("attention_dropout", 0),
                             .embedding_dropout = c.probability("embedding_dropout", 0)};
  result.head_width = c.head_width(result.heads, result.key_heads, result.width);
  result.rotary = rotary_config(c, result.context, result.head_width, 1e4);
  c.require_text("hidden_act", kPytorchTanh);
  return result;
}

JsonValue::Object starcoder_entries(const nn::StarcoderConfig& c) {
  JsonValue::Object entries{{"model_type", json(std::string("starcoder2"))},
                            {"architectures", json_list("Starcoder2ForCausalLM")},
                            {"vocab_size", json(c.vocab)},
                            {"max_position_embeddings", json(c.context)},
                            {"num_hidden_layers", json(c.layers)},
                            {"num_attention_heads", json(c.heads)},
                            {"num_key_value_heads", json(c.key_heads)},
                            {"head_dim", json(starcoder_head_width(c))},
                            {"hidden_size", json(c.width)},
                            {"intermediate_size", json(c.hidden)},
                            {"hidden_act", json(std::string(kPytorchTanh))},
                            {"norm_epsilon", json(c.norm_eps)},
                            {"use_bias", json(c.bias)},
                            {"residual_dropout", json(c.dropout)},
                            {"attention_dropout", json(c.attention_dropout)},
                            {"embedding_dropout", json(c.embedding_dropout)},
                            {"tie_word_embeddings", json(c.tied_head)},
                            {"sliding_window", c.window > 0 ? json(c.window) : JsonValue{}},
                            {"bos_token_id", {}},
                            {"eos_token_id", {}}};
  add_rotary_entries(entries, c.rotary, c.context, starcoder_head_width(c));
  return entries;
}

std::int64_t starcoder_parameters(const nn::StarcoderConfig& c) {
  const std::int64_t queries = c.heads * starcoder_head_width(c), keys = c.key_heads * starcoder_head_width(c);
  const std::int64_t weights = 2 * c.width * (queries + keys) + 2 * c.width * c.hidden;
  const std::int64_t biases = queries + 2 * keys + 2 * c.width + c.hidden, norms = 4 * c.width;
  return (c.tied_head ? 1 : 2) * c.vocab * c.width + c.layers * (weights + (c.bias ? biases : 0) + norms) + 2 * c.width;
}

nn::StarcoderConfig starcoder_config_of_gguf(const GgufSource& source) {
  source.require_plain();
  source.require("attention.sliding_window", 0);
  source.require("attention.scale", 0);
  source.require("rope.scaling.attn_factor", 1);
  const JsonValue::Object json{{"vocab_size", {source.vocabulary()}},
                               {"max_position_embeddings", {source.count("context_length")}},
                               {"num_hidden_layers", {source.count("block_count")}},
                               {"num_attention_heads", {source.count("attention.head_count")}},
                               {"num_key_value_heads", {source.count("attention.head_count_kv")}},
                               {"hidden_size", {source.count("embedding_length")}},
                               {"intermediate_size", {source.count("feed_forward_length")}},
                               {"norm_epsilon", {source.real("attention.layer_norm_epsilon")}},
                               {"use_bias", {source.tensor("blk.0.ffn_up.bias") != nullptr}},
                               {"tie_word_embeddings", {source.tensor(kGgufHead) == nullptr}},
                               {"rope_parameters", {gguf_rotary_entries(source)}}};
  const nn::StarcoderConfig config =
      starcoder_config(ConfigEntries({json}, source.what() + ": as a config.json"), "starcoder2");
  source.require("rope.dimension_count", static_cast<double>(starcoder_head_width(config)));
  return config;
}

GgufMetadata starcoder_gguf(const nn::StarcoderConfig& c) {
  check(c.window == 0 || c.window >= c.context,
        "save_gguf: llama.cpp's StarCoder 2 has no attention in windows, got a window of {} in a context of {}",
        c.window, c.context);
  check(c.rotary.scaling != nn::RotaryScaling::llama3 && c.rotary.scaling != nn::RotaryScaling::longrope,
        "save_gguf: llama.cpp's StarCoder 2 has no such scaling of rotary embeddings");
  check(starcoder_head_width(c) * c.heads == c.width,
        "save_gguf: llama.cpp's StarCoder 2 has heads of {} / {} columns, got {}", c.width, c.heads,
        starcoder_head_width(c));
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  GgufMetadata metadata{{"general.architecture", std::string("starcoder2")},
                        {"starcoder2.vocab_size", count(c.vocab)},
                        {"starcoder2.context_length", count(c.context)},
                        {"starcoder2.block_count", count(c.layers)},
                        {"starcoder2.embedding_length", count(c.width)},
                        {"starcoder2.feed_forward_length", count(c.hidden)},
                        {"starcoder2.attention.head_count", count(c.heads)},
                        {"starcoder2.attention.head_count_kv", count(c.key_heads)},
                        {"starcoder2.attention.layer_norm_epsilon", static_cast<float>(c.norm_eps)}};
  add_gguf_rotary(metadata, "starcoder2", c.rotary, starcoder_head_width(c));
  return metadata;
}

bool has_tied_starcoder_head(const nn::StarcoderConfig& c) { return c.tied_head; }

constexpr std::array<std::string_view, 1> kStarcoderTypes{"starcoder2"};

constexpr std::array<Names, 4> kStarcoderOutside{{
    {kGgufEmbedding, "model.embed_tokens.weight"},
    {kGgufHead, "lm_head.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output_norm.bias", "model.norm.bias"},
}};
constexpr std::array<Names, 8> kStarcoderInside{{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_up", "mlp.c_fc"},
    {"ffn_down", "mlp.c_proj"},
}};

}  // namespace

template <>
const ModelFamily<nn::Starcoder>& family() {
  static constexpr ModelFamily<nn::Starcoder> value{
      .types = kStarcoderTypes,
      .read = starcoder_config,
      .write = starcoder_entries,
      .parameter_count = starcoder_parameters,
      .tensors = {.own_prefix = "model.", .embedding = "model.embed_tokens.weight"},
      .has_tied_head = has_tied_starcoder_head,
      .adapter_task = "CAUSAL_LM",
      .gguf = {.architectures = kStarcoderTypes,
               .block = {"blk.", "model.layers."},
               .outside = kStarcoderOutside,
               .inside = kStarcoderInside,
               .read = starcoder_config_of_gguf,
               .write = starcoder_gguf}};
  return value;
}

}  // namespace mica::io::detail
