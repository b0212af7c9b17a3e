#pragma once

// Tokens that are found in a text before it is split into words: special tokens, and those added to a vocabulary.

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

struct AddedToken {
  std::int64_t id = 0;
  std::string content;
  bool single_word = false;    ///< matches only where no word character is next to it
  bool strip_left = false;     ///< absorbs the spaces before it
  bool strip_right = false;    ///< absorbs the spaces after it
  bool normalized = true;      ///< is searched for in the normalized text
  bool is_normalized = false;  ///< the content is normalized already
  bool special = false;        ///< a control token: ends a text, begins a turn …
};

/// Finds added tokens as the package `tokenizers` does: from left to right, the longest of several at the same
/// position.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  /// Calls on_text(part) and on_token(id) for the parts of `text`, valid UTF-8, in order. Without `special`, special
  /// tokens are treated as text.
  template <class OnText, class OnToken>
  void split(std::string_view text, bool special, const OnText& on_text, const OnToken& on_token) const {
    std::size_t done = 0;
    for (std::size_t at = 0; !tokens_.empty() && at < text.size();) {
      const Match match = next(text, at);
      if (match.token == nullptr) {
        break;
      }
      at = match.begin + match.token->content.size();
      if ((match.token->special && !special) || !is_allowed(text, match.begin, at, *match.token)) {
        continue;
      }
      // Spaces that the previous token absorbed are not available.
      const std::size_t begin =
          match.token->strip_left ? std::max(spaces_before(text, match.begin), done) : match.begin;
      if (done < begin) {
        on_text(text.substr(done, begin - done));
      }
      on_token(match.token->id);
      done = match.token->strip_right ? spaces_after(text, at) : at;
    }
    if (done < text.size()) {
      on_text(text.substr(done));
    }
  }

 private:
  struct Match {
    const AddedToken* token = nullptr;
    std::size_t begin = 0;
  };
  static std::size_t two_bytes(char first, char second) {
    return std::size_t{static_cast<unsigned char>(first)} << 8 | static_cast<unsigned char>(second);
  }
  Match next(std::string_view text, std::size_t at) const;
  const AddedToken* longest_at(std::string_view text) const;
  static bool is_allowed(std::string_view text, std::size_t begin, std::size_t end, const AddedToken& token);
  static std::size_t spaces_before(std::string_view text, std::size_t at);
  static std::size_t spaces_after(std::string_view text, std::size_t at);

  std::vector<AddedToken> tokens_;  // sorted by content
  std::bitset<1 << 16> begins_;     // the first two bytes of any token; for a token of one byte, with any second byte
};

}  // namespace mica::io::detail
