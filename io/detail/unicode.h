#pragma once

// UTF-8, the character classes that tokenizers need, and normalization forms C and D.

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

/// The classes \p{L}, \p{N}, \s and \w of regular expressions; Unicode 16.
class CharacterKinds {
 public:
  static const CharacterKinds& get();

  Kind kind(char32_t character) const { return static_cast<Kind>(flags_[character] & 3); }
  /// \w
  bool is_word(char32_t character) const { return (flags_[character] & kWord) != 0; }
  /// False if normalization to form C never changes the character, whatever is next to it.
  bool may_change(char32_t character) const { return (flags_[character] & kMayChange) != 0; }
  /// The same for form D.
  bool may_decompose(char32_t character) const { return (flags_[character] & kMayDecompose) != 0; }

 private:
  CharacterKinds();

  static constexpr std::uint8_t kWord = 4, kMayChange = 8, kMayDecompose = 16;
  std::uint8_t flags_[0x110000] = {};
};

/// The character classes of BERT's normalization; Unicode 8.
class BertCharacters {
 public:
  static const BertCharacters& get();

  /// Control and other characters that are removed; false for tabs and newlines.
  bool is_control(char32_t character) const { return (flags_[character] & kControl) != 0; }
  /// Forms a word of its own.
  bool is_punctuation(char32_t character) const { return (flags_[character] & kPunctuation) != 0; }
  /// An accent or another mark without width.
  bool is_mark(char32_t character) const { return (flags_[character] & kMark) != 0; }
  char32_t lower_case(char32_t character) const;

 private:
  BertCharacters();

  static constexpr std::uint8_t kControl = 1, kPunctuation = 2, kMark = 4, kUpper = 8;
  std::uint8_t flags_[0x110000] = {};
};

/// Normalization form D of Unicode 9.
std::u32string nfd(std::u32string_view characters);

/// Whether valid UTF-8 may differ from its normalization form C. A fast test, false for most texts.
bool may_need_nfc(std::string_view text);

/// Valid UTF-8 in normalization form C of Unicode 9 (Unicode Standard Annex 15).
std::string nfc(std::string_view text);

}  // namespace mica::io::detail
