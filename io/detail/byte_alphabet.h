#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

/// The characters that stand for bytes in GPT-2's files: visible characters of Latin-1 stand for themselves, other
/// bytes are mapped to U+0100 and above.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    bytes_.fill(-1);
    int moved = 0;
    for (int byte = 0; byte < 256; ++byte) {
      const bool is_visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const int character = is_visible ? byte : 256 + moved++;
      bytes_[static_cast<std::size_t>(character)] = byte;
      characters_[static_cast<std::size_t>(byte)] = static_cast<char32_t>(character);
    }
  }

  /// The bytes of a token, which must be valid UTF-8; nullopt if it contains a character outside this alphabet.
  std::optional<std::string> bytes(std::string_view token) const {
    std::string result;
    for (std::size_t at = 0; at < token.size();) {
      const Character c = character_at(token.data() + at);
      if (c.code >= bytes_.size() || bytes_[c.code] < 0) {
        return std::nullopt;
      }
      result.push_back(static_cast<char>(bytes_[c.code]));
      at += c.length;
    }
    return result;
  }

  /// The characters that stand for the bytes of a text.
  std::string characters(std::string_view text) const {
    std::string result;
    for (const char c : text) {
      append_utf8(result, characters_[static_cast<unsigned char>(c)]);
    }
    return result;
  }

 private:
  std::array<int, 256 + 68> bytes_;
  std::array<char32_t, 256> characters_{};
};

}  // namespace mica::io::detail
