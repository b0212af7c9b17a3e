#include <array>
#include <string>
#include <string_view>
#include <utility>

#include <mica/io/families/detail/family.h>

// BERT, MiniLM.

namespace mica::io::detail {

namespace {

constexpr std::array<std::pair<std::string_view, Activation>, 4> kActivations{{
    {"gelu", Activation::gelu},
    {"gelu_new", Activation::gelu_tanh},
    {kPytorchTanh, Activation::gelu_tanh},
    {"relu", Activation::relu},
}};

nn::BertConfig bert_config(const ConfigEntries& c, const std::string&) {
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
  c.require_divisor("num_attention_heads", result.heads, "hidden_size", result.width);
  c.require_text("position_embedding_type", "absolute");
  c.require_flag("is_decoder", false);
  return result;
}

JsonValue::Object bert_entries(const nn::BertConfig& c) {
  return {{"model_type", json(std::string("bert"))},
          {"architectures", json_list("BertModel")},
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

std::int64_t bert_parameters(const nn::BertConfig& c) {
  const std::int64_t block = 4 * c.width * c.width + 2 * c.width * c.hidden + 9 * c.width + c.hidden;
  return (c.vocab + c.context + c.types + 2) * c.width + c.layers * block + (c.pooler ? (c.width + 1) * c.width : 0);
}

void adapt_bert(nn::BertConfig& config, const StateDict& tensors) {
  config.pooler = tensors.contains("pooler.dense.weight") || tensors.contains("pooler.dense.bias");
}

constexpr std::array<std::string_view, 1> kBertTypes{"bert"};
constexpr std::array<std::string_view, 1> kBertObsolete{"embeddings.position_ids"};
// The first files were converted from TensorFlow, with its names.
constexpr std::array<Names, 2> kBertOldEndings{{
    {".LayerNorm.gamma", ".LayerNorm.weight"},
    {".LayerNorm.beta", ".LayerNorm.bias"},
}};

}  // namespace

template <>
const ModelFamily<nn::Bert>& family() {
  static constexpr ModelFamily<nn::Bert> value{
      .types = kBertTypes,
      .read = bert_config,
      .write = bert_entries,
      .parameter_count = bert_parameters,
      .tensors = {.outer_prefix = "bert.", .obsolete = kBertObsolete, .old_endings = kBertOldEndings},
      .adapt = adapt_bert,
      .adapter_task = "FEATURE_EXTRACTION"};
  return value;
}

}  // namespace mica::io::detail
