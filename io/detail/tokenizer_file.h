#pragma once

// The parts of a tokenizer, and the files of a tokenizer in a Hugging Face folder.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/io/detail/added_tokens.h>
#include <mica/io/detail/byte_pair_encoding.h>
#include <mica/io/detail/normalizer.h>
#include <mica/io/detail/pre_tokenizer.h>
#include <mica/io/detail/token_decoder.h>
#include <mica/io/detail/unigram.h>
#include <mica/io/detail/word_piece.h>
#include <mica/io/json.h>

namespace mica::io::detail {

/// The parts that define a tokenizer.
struct TokenizerDescription {
  Vocabulary vocabulary;                       ///< with the added tokens
  std::optional<WordPieceEncoder> word_piece;  ///< the model, instead of byte-pair encoding
  std::optional<UnigramEncoder> unigram;       ///< or this one
  std::vector<Merge> merges;
  BytePairOptions byte_pair;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder{{.kind = DecoderStep::Kind::byte_level}};
  std::vector<AddedToken> added_tokens;
  std::vector<std::int64_t> before, after;  ///< special tokens around a text
};

/// The contents of tokenizer_config.json; empty without the file.
struct TokenizerSettings {
  std::string tokenizer_class;
  std::optional<std::string> bos_token, eos_token, pad_token;
  std::string chat_template;
  std::vector<AddedToken> added_tokens;
  std::vector<AddedToken> special_tokens{};  ///< bos_token and others, without numbers
  std::vector<std::pair<std::string, std::string>>
      named_tokens{};  ///< "bos_token" and others, which chat templates use
  std::optional<bool> adds_bos{}, adds_eos{}, adds_prefix_space{}, is_legacy{};
  // From a GGUF file: two more tokens that end a text, and all tokens that do, sorted.
  std::optional<std::string> eot_token{}, eom_token{};
  std::vector<std::int64_t> end_tokens{};
};

/// The maximum length of an added token, in bytes. A bound keeps the search linear.
inline constexpr std::size_t kLongestAddedToken = 4096;

/// The merge of two tokens, "left right". Throws an Error that starts with `what` if the vocabulary lacks one.
Merge merge_of(const Vocabulary& vocabulary, std::string_view pair, const std::string& what);

/// Reads the contents of tokenizer.json, which tokenizer_config.json supplements. Errors start with `what`.
TokenizerDescription describe_tokenizer(const JsonValue& json, const TokenizerSettings& settings,
                                        const std::string& what);

/// The same from vocab.json and the text of merges.txt. tokenizer_config.json determines the special tokens and whether
/// words are split as for GPT-2 or for Qwen.
TokenizerDescription describe_tokenizer(const JsonValue& vocabulary, std::string_view merges,
                                        const TokenizerSettings& settings, const std::string& what);

/// Adds the tokens that tokenizer_config.json has and the description lacks.
void add_tokens(const TokenizerSettings& settings, TokenizerDescription& description, const std::string& what);

/// Adds the tokens to a text that tokenizer_config.json asks for with "add_bos_token" and "add_eos_token".
void apply_frame(const TokenizerSettings& settings, TokenizerDescription& description);

/// Reads the contents of tokenizer_config.json.
TokenizerSettings tokenizer_settings(const JsonValue& json, const std::string& what);

}  // namespace mica::io::detail
