#pragma once

// Normalizers of tokenizer.json, which change a text before it is split into words.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/regular_expression.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/detail/word_piece.h>

namespace mica::io::detail {

/// SentencePiece's table of replacements of characters and sequences of characters ("precompiled_charsmap").
class CharacterMap {
 public:
  /// Reads the table. Throws an Error that starts with `what`.
  CharacterMap(std::string_view bytes, const std::string& what);

  /// The package `tokenizers` replaces a whole grapheme cluster of less than 6 bytes by what the shortest of its
  /// beginnings in the table stands for, otherwise each character.
  std::string normalized_clusters(std::string_view text) const;
  /// SentencePiece replaces the longest sequences, from left to right. Of texts in `kept`, it keeps the first that is
  /// there.
  std::string normalized(std::string_view text, const std::vector<std::string>& kept) const;

 private:
  struct Found {
    std::size_t length = 0;  // of the sequence; 0 if there is none
    std::string_view text{};
  };
  Found find(std::string_view text, bool longest) const;
  Found found(std::size_t length, std::uint32_t value) const;

  std::vector<std::uint32_t> units_;  // a double array (darts-clone)
  std::string texts_;                 // each ends with a zero byte
};

struct NormalizerStep {
  enum class Kind : std::uint8_t {
    form,           ///< a Unicode normalization form
    lower_case,     ///< each character by itself
    strip,          ///< white space at the beginning and at the end
    strip_accents,  ///< all marks
    replace,        ///< all matches of `searched` by `text`
    prepend,        ///< `text`, unless the text is empty
    map,            ///< CharacterMap::normalized_clusters()
    sentence_map,   ///< CharacterMap::normalized()
    bert,           ///< bert_normalized()
    extra_spaces,   ///< SentencePiece's: removes spaces at both ends, and all but one of several
    nmt             ///< SentencePiece's: removes control characters, and replaces unusual spaces
  };
  Kind kind = Kind::form;
  NormalForm form = NormalForm::c;
  bool left = true, right = true;  ///< which ends are stripped
  Searched searched{};
  std::string text{};
  std::shared_ptr<const CharacterMap> map{};
  std::vector<std::string> kept{};  ///< of sentence_map: texts that are not changed
  BertNormalization bert{};

  bool operator==(const NormalizerStep&) const = default;
};

using Normalizer = std::vector<NormalizerStep>;

/// Whether a text may be cut before any ASCII character, and the parts normalized separately.
bool works_in_parts(const NormalizerStep& step);

/// Whether the step may change valid UTF-8. A fast test.
bool may_change(std::string_view text, const NormalizerStep& step);

/// The normalized text.
std::string normalized(std::string_view text, const NormalizerStep& step);

}  // namespace mica::io::detail
