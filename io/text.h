#pragma once

// Helpers for character-level language models: reading text files and tokenization.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mica::io {

/// The contents of a file. Throws an Error that names the file.
std::string read_text(const std::filesystem::path& path);

/// Conversion between UTF-8 text and Unicode code points. from_utf8 throws an Error with the position of the first
/// invalid byte.
std::u32string from_utf8(std::string_view text);
std::string to_utf8(std::u32string_view characters);

/// Maps characters to their positions in an alphabet.
class CharTokenizer {
 public:
  /// Throws an Error if the alphabet (UTF-8) is empty or contains a character twice.
  explicit CharTokenizer(std::string_view alphabet);

  /// The tokenizer for all characters of `text`, in the order of their code points.
  static CharTokenizer of(std::string_view text);

  /// The number of characters.
  std::int64_t size() const { return static_cast<std::int64_t>(alphabet_.size()); }
  /// All characters as UTF-8, as passed to the constructor.
  std::string alphabet() const { return to_utf8(alphabet_); }

  /// Throws an Error that names the first character not in the alphabet.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Throws an Error for a number outside the alphabet.
  std::string decode(std::span<const std::int32_t> tokens) const;

 private:
  std::u32string alphabet_;
  std::unordered_map<char32_t, std::int32_t> tokens_;
};

}  // namespace mica::io
