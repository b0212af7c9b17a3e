#include <array>
#include <string>

#include <mica/io/families/detail/encoder_heads.h>

namespace mica::io::detail {

namespace {

struct HeadClass {
  std::string_view ending;  // of the name of transformers' class
  nn::EncoderHead head = nn::EncoderHead::none;
  bool next_sentence = false;
};
constexpr std::array<HeadClass, 6> kHeadClasses{{
    {"Model"},
    {"ForMaskedLM", nn::EncoderHead::masked_lm},
    {"ForSequenceClassification", nn::EncoderHead::sequence},
    {"ForTokenClassification", nn::EncoderHead::tokens},
    {"ForPreTraining", nn::EncoderHead::masked_lm, true},
    {"ForNextSentencePrediction", nn::EncoderHead::none, true},
}};

}  // namespace

HeadEntries head_entries(const ConfigEntries& c) {
  HeadEntries result;
  const JsonValue* const architectures = c.find("architectures");
  const auto* const classes = architectures == nullptr ? nullptr : architectures->as<JsonValue::Array>();
  const auto* const name = classes == nullptr || classes->empty() ? nullptr : classes->front().as<std::string>();
  for (const HeadClass& each : kHeadClasses) {
    if (name != nullptr && name->ends_with(each.ending)) {
      result.head = each.head;
      result.next_sentence = each.next_sentence;
    }
  }
  const std::optional<ConfigEntries> labels = c.nested("id2label");
  if (labels && labels->size() > 0) {
    result.labels = labels->size();
  } else {
    result.labels = c.count("num_labels", 1, kMostTokens, 2);
  }
  if (result.head == nn::EncoderHead::masked_lm) {
    c.require_flag("tie_word_embeddings", true);
  }
  return result;
}

void add_head_entries(JsonValue::Object& entries, std::string_view classes, const HeadEntries& head) {
  for (const HeadClass& each : kHeadClasses) {
    if (each.head == head.head && each.next_sentence == head.next_sentence) {
      entries["architectures"] = json_list((std::string(classes) + std::string(each.ending)).c_str());
    }
  }
  if (head.head == nn::EncoderHead::sequence || head.head == nn::EncoderHead::tokens) {
    entries["num_labels"] = json(head.labels);
  }
}

}  // namespace mica::io::detail
