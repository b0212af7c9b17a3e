#pragma once

// SentencePiece's models (Kudo and Richardson, 2018, arXiv:1808.06226): unigram and byte-pair encoding of characters,
// in files (tokenizer.model) and in GGUF files.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/tokenizer_file.h>

namespace mica::io::detail {

struct SentencePieceModel {
  /// The numbers of both file formats.
  enum Type : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };
  struct Piece {
    std::string text;
    double score = 0;
    std::int32_t type = normal;
  };
  std::vector<Piece> pieces;
  bool is_unigram = true;
  bool has_byte_tokens = false;
  std::optional<std::int64_t> unknown_token{}, bos{}, eos{};
  std::string character_map{};     ///< bytes of a CharacterMap; empty: none
  bool removes_spaces = true;      ///< at both ends of a text, and all but one of several
  bool adds_prefix = true;         ///< begin with a space
  bool escapes_spaces = true;      ///< the tokens have U+2581 for a space
  bool prefix_only_first = false;  ///< no space after special tokens
  bool finds_in_raw_text = false;  ///< user-defined tokens are searched for before normalization
};

/// Reads a file, a message of protocol buffers. Throws an Error that starts with `what`.
SentencePieceModel parse_sentence_piece(std::string_view bytes, const std::string& what);

/// Does not set the tokens before and after a text.
TokenizerDescription describe_sentence_piece(const SentencePieceModel& model, const std::string& what);

/// Describes the tokenizer in a file. Adds the tokens of tokenizer_config.json, and sets the names of bos and eos if
/// the file has them and the settings do not.
TokenizerDescription describe_sentence_piece_file(std::string_view bytes, TokenizerSettings& settings,
                                                  const std::string& what);

}  // namespace mica::io::detail
