#pragma once

// Splits a text into the pieces that a model then encodes separately: the pre-tokenizers of tokenizer.json.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <mica/io/detail/regular_expression.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

/// The regular expressions of known tokenizers. They are matched by hand-written code: several times as fast as a
/// library for regular expressions, and with the same version of Unicode everywhere.
enum class Pattern {
  gpt2,    ///< GPT-2, SmolLM
  llama3,  ///< numbers of at most three digits
  qwen,    ///< single digits, otherwise as llama3
};

/// The regular expression as written in tokenizer.json.
std::string_view regular_expression(Pattern pattern);

/// The length in bytes of the match at the beginning of a text, at least 1. There always is one.
std::size_t match_length(Pattern pattern, std::string_view text);

/// Which pieces Split and Punctuation make of matches and the text between them, as in the package `tokenizers`.
enum class SplitBehavior : std::uint8_t { removed, isolated, merged_with_previous, merged_with_next, contiguous };

/// One step, which splits each piece of the previous step.
struct PreTokenizerStep {
  enum class Kind : std::uint8_t {
    pattern,          ///< the matches of a pattern
    digits,           ///< each numeric character (\p{N}) is a piece
    digit_runs,       ///< each run of numeric characters is a piece
    leading_space,    ///< adds a space to a piece that does not begin with one
    search,           ///< splits at the matches of `searched`
    punctuation,      ///< splits at punctuation, as BERT understands it
    white_space,      ///< runs of characters other than white space
    words,            ///< \w+|[^\w\s]+
    bert,             ///< bert_words()
    metaspace,        ///< replaces spaces by `text`, perhaps adds one in front, and splits before each of them
    byte_characters,  ///< replaces each byte by its character in GPT-2's alphabet
  };
  enum class Prepend : std::uint8_t { never, first, always };  ///< first: only at the beginning of the whole text

  Kind kind = Kind::pattern;
  Pattern pattern = Pattern::gpt2;                   // of Kind::pattern
  Searched searched{};                               // of Kind::search
  SplitBehavior behavior = SplitBehavior::isolated;  // of Kind::search and punctuation
  bool is_inverted = false;                          // of Kind::search: what does not match counts as a match
  std::string text{};                                // of Kind::metaspace
  Prepend prepend = Prepend::always;                 // of Kind::metaspace
  bool splits = true;                                // of Kind::metaspace

  bool operator==(const PreTokenizerStep&) const = default;
};

using PreTokenizer = std::vector<PreTokenizerStep>;

/// The pieces that a step other than Kind::pattern makes of a piece. They may refer to `storage`. `is_first`: the piece
/// begins the whole text.
void split_piece(const PreTokenizerStep& step, std::string_view piece, bool is_first, std::string& storage,
                 std::vector<std::string_view>& pieces);

/// Calls sink(piece) for each piece of valid UTF-8. `is_first`: the text begins the whole text.
template <class Sink>
void pre_tokenize(const PreTokenizer& steps, std::string_view text, bool is_first, const Sink& sink,
                  std::size_t step = 0) {
  if (step == steps.size()) {
    sink(text);
    return;
  }
  if (steps[step].kind == PreTokenizerStep::Kind::pattern) {
    for (bool is_at_start = is_first; !text.empty(); is_at_start = false) {
      const std::size_t length = match_length(steps[step].pattern, text);
      pre_tokenize(steps, text.substr(0, length), is_at_start, sink, step + 1);
      text.remove_prefix(length);
    }
    return;
  }
  std::string storage;
  std::vector<std::string_view> pieces;
  split_piece(steps[step], text, is_first, storage, pieces);
  const char* const begin = storage.empty() ? text.data() : storage.data();
  for (const std::string_view piece : pieces) {
    pre_tokenize(steps, piece, is_first && piece.data() == begin, sink, step + 1);
  }
}

}  // namespace mica::io::detail
