#pragma once

// What a tokenizer is made of, and the files of one in a folder of Hugging Face's.

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

/// What the files say about encoding.
struct TokenizerDescription {
  Vocabulary vocabulary;                       ///< with the added tokens
  std::optional<WordPieceEncoder> word_piece;  ///< instead of byte-pair encoding
  std::vector<Merge> merges;
  bool ignore_merges = false;
  bool is_nfc = false;                    ///< texts are brought into normalization form C
  std::optional<BertNormalization> bert;  ///< or normalized so
  PreTokenizer pre_tokenizer;             ///< of byte-pair encoding
  std::vector<AddedToken> added_tokens;
  std::vector<std::int64_t> before, after;  ///< special tokens around a text
};

/// What tokenizer_config.json says about using it; empty without the file.
struct TokenizerSettings {
  std::string tokenizer_class;
  std::optional<std::string> bos_token, eos_token, pad_token;
  std::string chat_template;
  std::vector<AddedToken> added_tokens;
  // Of a GGUF file: other tokens that end a text, and all that do, sorted.
  std::optional<std::string> eot_token{}, eom_token{};
  std::vector<std::int64_t> end_tokens{};
};

/// The longest added token in bytes: keeps the search for them linear.
inline constexpr std::size_t kLongestAddedToken = 4096;

/// The merge of two tokens, "left right". Throws an Error that starts with `what` if the vocabulary lacks one.
Merge merge_of(const Vocabulary& vocabulary, std::string_view pair, const std::string& what);

/// Tokenizers from descriptions, and the other way round.
struct TokenizerParts {
  static Tokenizer tokenizer(TokenizerDescription description, TokenizerSettings settings, const std::string& what);
  /// Not of a tokenizer with a WordPieceEncoder.
  static TokenizerDescription description(const Tokenizer& tokenizer);
  static const TokenizerSettings& settings(const Tokenizer& tokenizer);
};

/// Reads the contents of tokenizer.json. Errors start with `what`.
TokenizerDescription describe_tokenizer(const JsonValue& json, const std::string& what);

/// The same from vocab.json and the text of merges.txt. Special tokens and the choice between GPT-2's and Qwen's words
/// are from tokenizer_config.json.
TokenizerDescription describe_tokenizer(const JsonValue& vocabulary, std::string_view merges,
                                        const TokenizerSettings& settings, const std::string& what);

/// Reads the contents of tokenizer_config.json.
TokenizerSettings tokenizer_settings(const JsonValue& json, const std::string& what);

}  // namespace mica::io::detail
