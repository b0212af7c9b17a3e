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

bool has_tied_starcoder_head(const nn::StarcoderConfig& c) { return c.tied_head; }

constexpr std::array<std::string_view, 1> kStarcoderTypes{"starcoder2"};

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
      .adapter_task = "CAUSAL_LM"};
  return value;
}

}  // namespace mica::io::detail
