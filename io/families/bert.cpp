#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/families/detail/encoder_heads.h>
#include <mica/io/families/detail/family.h>

// BERT and MiniLM, RoBERTa and XLM-R, DistilBERT.

namespace mica::io::detail {

namespace {

using nn::BertKind;
using nn::EncoderHead;

constexpr std::array<std::pair<std::string_view, Activation>, 4> kActivations{{
    {"gelu", Activation::gelu},
    {"gelu_new", Activation::gelu_tanh},
    {kPytorchTanh, Activation::gelu_tanh},
    {"relu", Activation::relu},
}};

// By kind: model_type, and how transformers' classes and the names in files with a head begin.
struct KindNames {
  std::string_view type, classes, prefix;
};
constexpr std::array<KindNames, 4> kKinds{{{"bert", "Bert", "bert."},
                                           {"roberta", "Roberta", "roberta."},
                                           {"xlm-roberta", "XLMRoberta", "roberta."},
                                           {"distilbert", "DistilBert", "distilbert."}}};
constexpr std::array<std::string_view, 4> kBertTypes{kKinds[0].type, kKinds[1].type, kKinds[2].type, kKinds[3].type};

const KindNames& names_of(BertKind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

bool has_roberta_positions(BertKind kind) { return kind == BertKind::roberta || kind == BertKind::xlm_roberta; }

// The names of entries, which differ in DistilBERT.
struct EntryNames {
  const char *layers = "num_hidden_layers", *heads = "num_attention_heads", *width = "hidden_size",
             *hidden = "intermediate_size", *activation = "hidden_act", *dropout = "hidden_dropout_prob",
             *attention_dropout = "attention_probs_dropout_prob", *head_dropout = "classifier_dropout";
};
constexpr EntryNames kBertEntries;
constexpr EntryNames kDistilBertEntries{.layers = "n_layers",
                                        .heads = "n_heads",
                                        .width = "dim",
                                        .hidden = "hidden_dim",
                                        .activation = "activation",
                                        .dropout = "dropout",
                                        .attention_dropout = "attention_dropout",
                                        .head_dropout = "seq_classif_dropout"};
constexpr double kDistilBertEps = 1e-12;

nn::BertConfig bert_config(const ConfigEntries& c, const std::string& type) {
  const auto at = std::find(kBertTypes.begin(), kBertTypes.end(), type);
  const auto kind = static_cast<BertKind>(at - kBertTypes.begin());
  const bool is_distilbert = kind == BertKind::distilbert;
  const EntryNames& names = is_distilbert ? kDistilBertEntries : kBertEntries;
  const HeadEntries head = head_entries(c);
  nn::BertConfig result{.kind = kind,
                        .vocab = c.count("vocab_size", 1, kMostTokens),
                        .context = c.count("max_position_embeddings", 1, kMostPositions),
                        .types = is_distilbert ? 0 : c.count("type_vocab_size", 1, kMostTokens, 2),
                        .layers = c.count(names.layers, 0, kMostLayers),
                        .heads = c.count(names.heads, 1, kMostHeads),
                        .width = c.count(names.width, 1, kWidest),
                        .hidden = c.count(names.hidden, 1, 16 * kWidest),
                        .norm_eps = is_distilbert ? kDistilBertEps : c.number("layer_norm_eps", 0, 1e-12),
                        .dropout = c.probability(names.dropout, 0.1),
                        .attention_dropout = c.probability(names.attention_dropout, 0.1),
                        .activation = c.choice(names.activation, "gelu", kActivations),
                        .pooler = !is_distilbert,
                        .head = head.head,
                        .labels = head.labels,
                        .next_sentence = kind == BertKind::bert && head.next_sentence,
                        .gelu_pytorch_tanh = c.text(names.activation, "") == kPytorchTanh};
  result.head_dropout = c.probability(names.head_dropout, is_distilbert ? 0.2 : result.dropout);
  if (has_roberta_positions(kind)) {
    // Positions begin behind the index of the padding.
    result.padding = c.count("pad_token_id", 0, result.vocab - 1, 1);
    result.context -= result.padding + 1;
    if (result.context < 1) {
      c.refuse("max_position_embeddings", fmt::format("more than \"pad_token_id\" + 1, {}", result.padding + 1));
    }
  }
  c.require_divisor(names.heads, result.heads, names.width, result.width);
  c.require_text("position_embedding_type", "absolute");
  c.require_flag("is_decoder", false);
  return result;
}

JsonValue::Object bert_entries(const nn::BertConfig& c) {
  const bool is_distilbert = c.kind == BertKind::distilbert, is_bert = c.kind == BertKind::bert;
  const EntryNames& names = is_distilbert ? kDistilBertEntries : kBertEntries;
  check(!is_distilbert || c.norm_eps == kDistilBertEps,
        "save_pretrained: transformers' DistilBERT has a norm_eps of {}, got {}", kDistilBertEps, c.norm_eps);
  check(!c.next_sentence || (is_bert && (c.head == EncoderHead::none || c.head == EncoderHead::masked_lm)),
        "save_pretrained: transformers has the head for next sentences in BERT only, alone or with masked_lm");
  const std::int64_t before = has_roberta_positions(c.kind) ? c.padding + 1 : 0;
  JsonValue::Object entries{{"model_type", json(std::string(names_of(c.kind).type))},
                            {"vocab_size", json(c.vocab)},
                            {"max_position_embeddings", json(c.context + before)},
                            {names.layers, json(c.layers)},
                            {names.heads, json(c.heads)},
                            {names.width, json(c.width)},
                            {names.hidden, json(c.hidden)},
                            {names.activation, json(c.activation == Activation::gelu_tanh && c.gelu_pytorch_tanh
                                                        ? kPytorchTanh
                                                        : name_of(c.activation, kActivations))},
                            {names.dropout, json(c.dropout)},
                            {names.attention_dropout, json(c.attention_dropout)},
                            {names.head_dropout, json(c.head_dropout)}};
  add_head_entries(entries, names_of(c.kind).classes, {c.head, c.labels, c.next_sentence});
  if (!is_distilbert) {
    entries["type_vocab_size"] = json(c.types);
    entries["layer_norm_eps"] = json(c.norm_eps);
    entries["position_embedding_type"] = json(std::string("absolute"));
  }
  if (before > 0) {
    entries["pad_token_id"] = json(c.padding);
  }
  return entries;
}

std::int64_t bert_parameters(const nn::BertConfig& c) {
  const std::int64_t block = 4 * c.width * c.width + 2 * c.width * c.hidden + 9 * c.width + c.hidden;
  const std::int64_t square = (c.width + 1) * c.width,
                     positions = c.context + (has_roberta_positions(c.kind) ? c.padding + 1 : 0);
  std::int64_t heads = (c.pooler ? square : 0) + (c.next_sentence ? 2 * (c.width + 1) : 0);
  if (c.head == EncoderHead::masked_lm) {
    heads += square + 2 * c.width + c.vocab;
  } else if (c.head != EncoderHead::none) {
    const bool has_layer = c.head == EncoderHead::sequence && c.kind != BertKind::bert;
    heads += (c.width + 1) * c.labels + (has_layer ? square : 0);
  }
  return (c.vocab + positions + c.types + 2) * c.width + c.layers * block + heads;
}

void adapt_bert(nn::BertConfig& config, const StateDict& tensors) {
  const auto has_layer = [&](const std::string& name) {
    return tensors.contains(name + ".weight") || tensors.contains(name + ".bias");
  };
  config.pooler = config.kind != BertKind::distilbert && has_layer("pooler.dense");
  config.next_sentence = config.kind == BertKind::bert && config.pooler && has_layer("next_sentence");
  const bool may_be_sequence = config.kind == BertKind::bert ? config.pooler : has_layer("pre_classifier");
  if (has_layer("head.dense") || has_layer("head.norm") || tensors.contains("lm_head.bias")) {
    config.head = EncoderHead::masked_lm;
  } else if (!has_layer("classifier")) {
    config.head = EncoderHead::none;
  } else if (config.head != EncoderHead::tokens || config.kind != BertKind::bert) {
    config.head = may_be_sequence ? EncoderHead::sequence : EncoderHead::tokens;
  }
}

bool ties_bert_head(const nn::BertConfig&) { return true; }

constexpr std::array<std::string_view, 1> kBertObsolete{"embeddings.position_ids"};
constexpr std::array<Names, 5> kBertNames{{
    {"cls.predictions.transform.dense.", "head.dense."},
    {"cls.predictions.transform.LayerNorm.", "head.norm."},
    {"cls.predictions.bias", "lm_head.bias"},
    {"cls.predictions.decoder.", "lm_head."},
    {"cls.seq_relationship.", "next_sentence."},
}};
// The first files were converted from TensorFlow, with its names.
constexpr std::array<Names, 4> kBertOldNames{{
    {".LayerNorm.gamma", ".LayerNorm.weight"},
    {".LayerNorm.beta", ".LayerNorm.bias"},
    {"head.norm.gamma", "head.norm.weight"},
    {"head.norm.beta", "head.norm.bias"},
}};
constexpr std::array<Names, 4> kRobertaNames{{
    {"lm_head.dense.", "head.dense."},
    {"lm_head.layer_norm.", "head.norm."},
    {"classifier.out_proj.", "classifier."},  // of sequences
    {"classifier.dense.", "pre_classifier."},
}};
constexpr std::array<Names, 3> kRobertaOldNames{{
    kRobertaNames[2],
    kRobertaNames[3],
    {"lm_head.decoder.", "lm_head."},
}};
constexpr std::array<Names, 12> kDistilBertNames{{
    {"transformer.layer.", "encoder.layer."},
    {".attention.q_lin.", ".attention.self.query."},
    {".attention.k_lin.", ".attention.self.key."},
    {".attention.v_lin.", ".attention.self.value."},
    {".attention.out_lin.", ".attention.output.dense."},
    {".sa_layer_norm.", ".attention.output.LayerNorm."},
    {".ffn.lin1.", ".intermediate.dense."},
    {".ffn.lin2.", ".output.dense."},
    {".output_layer_norm.", ".output.LayerNorm."},
    {"vocab_transform.", "head.dense."},
    {"vocab_layer_norm.", "head.norm."},
    {"vocab_projector.", "lm_head."},
}};
constexpr std::array<std::string_view, 5> kBertHeads{"head.", "lm_head.", "pre_classifier.", "classifier.",
                                                     "next_sentence."};

FileTensors bert_tensors(const nn::BertConfig& c) {
  const std::string_view prefix = names_of(c.kind).prefix;
  const bool has_head = c.head != EncoderHead::none || c.next_sentence;
  FileTensors result{.prefix = has_head ? prefix : "",
                     .outer_prefix = prefix,
                     .unprefixed = kBertHeads,
                     .embedding = "embeddings.word_embeddings.weight",
                     .obsolete = kBertObsolete,
                     .names = kBertNames,
                     .old_names = kBertOldNames};
  if (has_roberta_positions(c.kind)) {
    result.names = std::span(kRobertaNames).first(c.head == EncoderHead::tokens ? 2 : 4);
    result.old_names = kRobertaOldNames;
  } else if (c.kind == BertKind::distilbert) {
    result.names = kDistilBertNames;
    result.old_names = {};
  }
  return result;
}

}  // namespace

template <>
const ModelFamily<nn::Bert>& family() {
  static constexpr ModelFamily<nn::Bert> value{.types = kBertTypes,
                                               .read = bert_config,
                                               .write = bert_entries,
                                               .parameter_count = bert_parameters,
                                               .tensors_of = bert_tensors,
                                               .has_tied_head = ties_bert_head,
                                               .adapt = adapt_bert,
                                               .heads = kEncoderHeads,
                                               .adapter_task = "FEATURE_EXTRACTION"};
  return value;
}

}  // namespace mica::io::detail
