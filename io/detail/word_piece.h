#pragma once

// BERT's tokenizer (Devlin et al., 2018, arXiv:1810.04805): normalization, words, and pieces of words.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/byte_pair_encoding.h>

namespace mica::io::detail {

struct BertNormalization {
  bool clean_text = true;        ///< removes control characters; all spaces become ' '
  bool separate_chinese = true;  ///< Chinese characters are words
  bool strip_accents = true;
  bool lower_case = true;
};

/// Valid UTF-8, normalized.
std::string bert_normalized(std::string_view text, const BertNormalization& options);

/// The words of valid UTF-8: between spaces, and with punctuation as words of a character.
std::vector<std::string_view> bert_words(std::string_view text);

/// Cuts a word into the longest pieces that are tokens, from left to right. Pieces that do not begin the word have a
/// prefix in the vocabulary.
class WordPieceEncoder {
 public:
  WordPieceEncoder() = default;
  WordPieceEncoder(std::string prefix, std::int64_t unknown, std::int64_t most_characters)
      : prefix_(std::move(prefix)), unknown_(unknown), most_characters_(most_characters) {}

  /// Appends the tokens of one word, or the unknown token alone.
  void encode(std::string_view word, const Vocabulary& vocabulary, std::vector<std::int64_t>& out) const;

  /// What the decoder writes for a token: with a space before it, or without its prefix.
  std::string decoded(std::string_view token, bool is_first) const;

  bool cleans_up = true;  ///< the decoder removes spaces before punctuation and contractions

 private:
  std::string prefix_ = "##";
  std::int64_t unknown_ = 0, most_characters_ = 100;
};

}  // namespace mica::io::detail
