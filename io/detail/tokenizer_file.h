#pragma once

// The files of a tokenizer in a folder of Hugging Face's.

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
