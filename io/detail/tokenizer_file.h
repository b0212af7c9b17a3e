#pragma once

// The parts of a tokenizer, and the files of a tokenizer in a Hugging Face folder.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <mica/io/detail/added_tokens.h>
#include <mica/io/detail/byte_pair_encoding.h>
#include <mica/io/detail/pre_tokenizer.h>
#include <mica/io/detail/word_piece.h>
#include <mica/io/json.h>
#include <mica/io/tokenizer.h>

namespace mica::io::detail {

/// The parts that define encoding.
struct TokenizerDescription {
  Vocabulary vocabulary;                       ///< with the added tokens
  std::optional<WordPieceEncoder> word_piece;  ///< instead of byte-pair encoding
  std::vector<Merge> merges;
  bool ignore_merges = false;
  bool is_nfc = false;                    ///< normalize texts to form C
  std::optional<BertNormalization> bert;  ///< or normalize them like this
  PreTokenizer pre_tokenizer;             ///< of byte-pair encoding
  std::vector<AddedToken> added_tokens;
  std::vector<std::int64_t> before, after;  ///< special tokens around a text
};

/// The contents of tokenizer_config.json; empty without the file.
struct TokenizerSettings {
  std::string tokenizer_class;
  std::optional<std::string> bos_token, eos_token, pad_token;
  std::string chat_template;
  std::vector<AddedToken> added_tokens;
  // From a GGUF file: two more tokens that end a text, and all tokens that do, sorted.
  std::optional<std::string> eot_token{}, eom_token{};
  std::vector<std::int64_t> end_tokens{};
};

/// The maximum length of an added token, in bytes. A bound keeps the search linear.
inline constexpr std::size_t kLongestAddedToken = 4096;

/// The merge of two tokens, "left right". Throws an Error that starts with `what` if the vocabulary lacks one.
Merge merge_of(const Vocabulary& vocabulary, std::string_view pair, const std::string& what);

/// Converts descriptions to tokenizers and back.
struct TokenizerParts {
  static Tokenizer tokenizer(TokenizerDescription description, TokenizerSettings settings, const std::string& what);
  /// Not for a tokenizer with a WordPieceEncoder.
  static TokenizerDescription description(const Tokenizer& tokenizer);
  static const TokenizerSettings& settings(const Tokenizer& tokenizer);
};

/// Reads the contents of tokenizer.json. Errors start with `what`.
TokenizerDescription describe_tokenizer(const JsonValue& json, const std::string& what);

/// The same from vocab.json and the text of merges.txt. tokenizer_config.json determines the special tokens and whether
/// words are split as for GPT-2 or for Qwen.
TokenizerDescription describe_tokenizer(const JsonValue& vocabulary, std::string_view merges,
                                        const TokenizerSettings& settings, const std::string& what);

/// Reads the contents of tokenizer_config.json.
TokenizerSettings tokenizer_settings(const JsonValue& json, const std::string& what);

}  // namespace mica::io::detail
