#pragma once

// BERT's tokenizer (Devlin et al., 2018, arXiv:1810.04805): normalization, splitting into words, and WordPiece.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/byte_pair_encoding.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

struct BertNormalization {
  bool clean_text = true;        ///< remove control characters, and replace all white space by ' '
  bool separate_chinese = true;  ///< make each Chinese character a word
  bool strip_accents = true;
  bool lower_case = true;

  bool operator==(const BertNormalization&) const = default;
};

/// Normalizes a text, which must be valid UTF-8.
std::string bert_normalized(std::string_view text, const BertNormalization& options);

/// Calls on_word with each word of valid UTF-8. Spaces separate words, and each punctuation character is a word.
template <class OnWord>
void bert_words(std::string_view text, const OnWord& on_word) {
  const CharacterKinds& kinds = CharacterKinds::get();
  const BertCharacters& characters = BertCharacters::get();
  std::size_t begin = 0;
  const auto end_word = [&](std::size_t end) {
    if (begin < end) {
      on_word(text.substr(begin, end - begin));
    }
    begin = end;
  };
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    if (kinds.kind(c.code) == Kind::space) {
      end_word(at);
      begin = at + c.length;
    } else if (characters.is_punctuation(c.code)) {
      end_word(at);
      end_word(at + c.length);
    }
    at += c.length;
  }
  end_word(text.size());
}

/// Splits a word into the longest pieces that are tokens, from left to right. In the vocabulary, pieces that do not
/// begin a word have a prefix.
class WordPieceEncoder {
 public:
  WordPieceEncoder() = default;
  WordPieceEncoder(std::string prefix, std::int64_t unknown, std::int64_t most_characters)
      : prefix_(std::move(prefix)), unknown_(unknown), most_characters_(most_characters) {}

  /// Appends the tokens of one word and returns true, or the unknown token alone and returns false.
  bool encode(std::string_view word, const Vocabulary& vocabulary, std::vector<std::int64_t>& out) const;

 private:
  std::string prefix_ = "##";
  std::int64_t unknown_ = 0, most_characters_ = 100;
};

}  // namespace mica::io::detail
