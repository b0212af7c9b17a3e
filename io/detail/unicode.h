#pragma once

// UTF-8, the character classes that tokenizers need, and normalization forms.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mica::io::detail {

/// The length of the valid UTF-8 at the beginning of the text, in bytes.
std::size_t valid_utf8_length(std::string_view text);

/// The text with each invalid sequence replaced by U+FFFD, as with Python's errors="replace". A sequence is the longest
/// valid prefix of a character, or one byte (Unicode 16, section 3.9, "U+FFFD substitution of maximal subparts").
std::string repaired_utf8(std::string_view text);

/// The length of the text without an incomplete character at its end.
std::size_t complete_utf8_length(std::string_view text);

void append_utf8(std::string& text, char32_t character);

struct Character {
  char32_t code;
  std::size_t length;  // in bytes
};

/// The character that begins at `at`, in valid UTF-8.
inline Character character_at(const char* at) {
  const auto byte = [at](int i) { return static_cast<char32_t>(static_cast<unsigned char>(at[i])); };
  const char32_t first = byte(0);
  if (first < 0x80) {
    return {first, 1};
  }
  if (first < 0xE0) {
    return {(first & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  }
  if (first < 0xF0) {
    return {(first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  }
  return {(first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
}

/// The index at which the character before text[end] begins, in valid UTF-8; end > 0.
inline std::size_t character_before(std::string_view text, std::size_t end) {
  do {
    --end;
  } while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

enum class Kind : std::uint8_t { other, letter, number, space };

/// Canonical composition and decomposition, and their variants that also replace compatible characters (Unicode
/// Standard Annex 15).
enum class NormalForm : std::uint8_t { c, d, kc, kd };

/// The classes \p{L}, \p{N}, \s and \w of regular expressions; Unicode 16.
class CharacterKinds {
 public:
  static const CharacterKinds& get();

  Kind kind(char32_t character) const { return static_cast<Kind>(flags_[character] & 3); }
  /// \w
  bool is_word(char32_t character) const { return (flags_[character] & kWord) != 0; }
  /// False if normalization never changes the character, whatever is next to it.
  bool may_change(char32_t character, NormalForm form) const { return (flags_[character] & changes_in(form)) != 0; }

 private:
  CharacterKinds();

  static constexpr std::uint8_t kWord = 4;
  static int changes_in(NormalForm form) { return 8 << static_cast<int>(form); }
  std::uint8_t flags_[0x110000] = {};
};

/// Character classes of BERT's normalization, Unicode 8, and of other normalizers.
class BertCharacters {
 public:
  static const BertCharacters& get();

  /// Control and other characters that are removed; false for tabs and newlines.
  bool is_control(char32_t character) const { return (flags_[character] & kControl) != 0; }
  /// Forms a word of its own.
  bool is_punctuation(char32_t character) const { return (flags_[character] & kPunctuation) != 0; }
  /// An accent or another mark without width.
  bool is_mark(char32_t character) const { return (flags_[character] & kBertMark) != 0; }
  /// General category M, Unicode 9.
  bool is_any_mark(char32_t character) const { return (flags_[character] & kMark) != 0; }
  char32_t lower_case(char32_t character) const;

 private:
  BertCharacters();

  static constexpr std::uint8_t kControl = 1, kPunctuation = 2, kBertMark = 4, kUpper = 8, kMark = 16;
  std::uint8_t flags_[0x110000] = {};
};

/// The upper and lower case of a character by itself, in the version of Unicode of utf8proc.
char32_t upper_case(char32_t character);
char32_t lower_case(char32_t character);

/// Normalization form D of Unicode 9.
std::u32string nfd(std::u32string_view characters);

/// Whether normalization may change valid UTF-8. A fast test, false for most texts.
bool may_change(std::string_view text, NormalForm form);

/// Valid UTF-8 in a normalization form of Unicode 9.
std::string normal_form(std::string_view text, NormalForm form);

/// The length in bytes of the grapheme cluster at the beginning of valid UTF-8, which must not be empty.
std::size_t grapheme_length(std::string_view text);

}  // namespace mica::io::detail
