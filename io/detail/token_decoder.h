#pragma once

// Decoders of tokenizer.json, which turn tokens into text.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/regular_expression.h>

namespace mica::io::detail {

struct DecoderStep {
  enum class Kind : std::uint8_t {
    byte_level,   ///< joins the tokens; their characters stand for bytes, in GPT-2's alphabet
    replace,      ///< all matches of `searched` in a token by `text`
    byte_tokens,  ///< consecutive tokens such as "<0x41>" form a token of these bytes; U+FFFD each if it is not UTF-8
    fuse,         ///< joins the tokens
    strip,        ///< up to `start` and `stop` times `text` from the beginning and the end of a token
    metaspace,    ///< `text` by a space; with `drops_first`, by nothing in the first token
    word_piece,   ///< adds a space before tokens that do not begin with `text`, and removes it from others
    suffix,       ///< `text` by a space; in the last token, by nothing
    join          ///< spaces between the tokens
  };
  Kind kind = Kind::byte_level;
  Searched searched{};
  std::string text{};
  std::size_t start = 0, stop = 0;
  bool drops_first = true;
  bool cleans_up = false;  ///< of Kind::word_piece: removes spaces before punctuation and contractions

  bool operator==(const DecoderStep&) const = default;
};

using Decoder = std::vector<DecoderStep>;

/// Decodes tokens one after the other. What later tokens may change is held back until they come.
class TokenDecoder {
 public:
  explicit TokenDecoder(const Decoder& steps) : steps_(&steps), states_(steps.size()) {}

  /// Appends the bytes that a token completes.
  void push(std::string_view token, std::string& out) { feed(0, std::string(token), true, out); }
  /// Appends the rest.
  void finish(std::string& out);

 private:
  struct State {
    std::size_t tokens = 0;  // that have come
    std::size_t strip_left = 0;
    std::string pending;
  };
  bool is_fused(std::size_t step) const;
  // `begins`: the part begins a token.
  void feed(std::size_t step, std::string part, bool begins, std::string& out);
  void flush(std::size_t step, std::string& out);

  const Decoder* steps_;
  std::vector<State> states_;
};

/// The bytes of a token that is not the first of a text, as far as they do not depend on other tokens.
std::string bytes_of_token(const Decoder& steps, std::string_view token);

}  // namespace mica::io::detail
