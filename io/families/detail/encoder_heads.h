#pragma once

// The entries of config.json that describe the heads of encoders.

#include <cstdint>
#include <string_view>

#include <mica/io/families/detail/config_entries.h>
#include <mica/io/json.h>
#include <mica/nn/models/encoder_head.h>

namespace mica::io::detail {

/// For errors.
inline constexpr std::string_view kEncoderHeads =
    "masked language modeling, next sentences (BERT), and classification of sequences and of tokens";

struct HeadEntries {
  nn::EncoderHead head = nn::EncoderHead::none;
  std::int64_t labels = 2;
  bool next_sentence = false;
};

/// The head of the class in "architectures"; none if mica does not have it.
HeadEntries head_entries(const ConfigEntries& entries);

/// `classes`: how the names of transformers' classes begin.
void add_head_entries(JsonValue::Object& entries, std::string_view classes, const HeadEntries& head);

}  // namespace mica::io::detail
