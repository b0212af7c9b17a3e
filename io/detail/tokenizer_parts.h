#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/tokenizer_file.h>
#include <mica/io/tokenizer.h>

namespace mica::io::detail {

/// Converts descriptions to tokenizers and back.
struct TokenizerParts {
  static Tokenizer tokenizer(TokenizerDescription description, TokenizerSettings settings, const std::string& what);
  static TokenizerDescription description(const Tokenizer& tokenizer);
  static const TokenizerSettings& settings(const Tokenizer& tokenizer);
  /// A token as the file has it.
  static const std::string& text(const Tokenizer& tokenizer, std::int64_t token);
  /// The tokens of a text with special tokens. Those with `mark` in them are plain text; the mark is removed.
  static std::vector<std::int64_t> encode_marked(const Tokenizer& tokenizer, std::string_view text,
                                                 std::string_view mark);
};

}  // namespace mica::io::detail
