#pragma once

// The normalizer, pre-tokenizer and decoder of a tokenizer.json. Errors start with the reader's `what`.

#include <string>
#include <string_view>

#include <mica/io/detail/json_reader.h>
#include <mica/io/detail/normalizer.h>
#include <mica/io/detail/pre_tokenizer.h>
#include <mica/io/detail/token_decoder.h>

namespace mica::io::detail {

Normalizer normalizer_of(const JsonReader& read, const JsonValue& json);

struct PreTokenizerSteps {
  PreTokenizer steps;
  bool is_byte_level = false;  ///< ends with ByteLevel, which replaces bytes by characters and is not among the steps
};
PreTokenizerSteps pre_tokenizer_of(const JsonReader& read, const JsonValue& json);

Decoder decoder_of(const JsonReader& read, const JsonValue& json);

}  // namespace mica::io::detail
