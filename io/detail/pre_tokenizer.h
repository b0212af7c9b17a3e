#pragma once

// Splits a text into the pieces that byte-pair encoding then encodes separately.

#include <string>
#include <string_view>
#include <vector>

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

/// One step, which splits each piece of the previous step.
struct PreTokenizerStep {
  enum class Kind {
    pattern,       ///< the matches of a pattern
    digits,        ///< each numeric character (\p{N}) is a piece
    digit_runs,    ///< each run of numeric characters is a piece
    leading_space  ///< adds a space to a piece that does not begin with one
  };
  Kind kind = Kind::pattern;
  Pattern pattern = Pattern::gpt2;  // of Kind::pattern

  bool operator==(const PreTokenizerStep&) const = default;
};

using PreTokenizer = std::vector<PreTokenizerStep>;

/// Calls sink(piece) for each piece of valid UTF-8.
template <class Sink>
void pre_tokenize(const PreTokenizer& steps, std::string_view text, const Sink& sink, std::size_t step = 0) {
  if (step == steps.size()) {
    sink(text);
    return;
  }
  const auto cut = [&](const auto& length_at) {
    while (!text.empty()) {
      const std::size_t length = length_at(text);
      pre_tokenize(steps, text.substr(0, length), sink, step + 1);
      text.remove_prefix(length);
    }
  };
  // The length of the leading run of numeric characters or, if !numbers, of other characters.
  const auto run_length = [](std::string_view rest, bool numbers) {
    const CharacterKinds& kinds = CharacterKinds::get();
    std::size_t at = 0;
    while (at < rest.size()) {
      const Character c = character_at(rest.data() + at);
      if ((kinds.kind(c.code) == Kind::number) != numbers) {
        break;
      }
      at += c.length;
    }
    return at;
  };
  const PreTokenizerStep& own = steps[step];
  switch (own.kind) {
    case PreTokenizerStep::Kind::pattern:
      cut([&](std::string_view rest) { return match_length(own.pattern, rest); });
      break;
    case PreTokenizerStep::Kind::digits:
      cut([&](std::string_view rest) {
        const std::size_t others = run_length(rest, false);
        return others > 0 ? others : character_at(rest.data()).length;
      });
      break;
    case PreTokenizerStep::Kind::digit_runs:
      cut([&](std::string_view rest) {
        const std::size_t others = run_length(rest, false);
        return others > 0 ? others : run_length(rest, true);
      });
      break;
    case PreTokenizerStep::Kind::leading_space:
      if (text.starts_with(' ')) {
        pre_tokenize(steps, text, sink, step + 1);
      } else {
        pre_tokenize(steps, " " + std::string(text), sink, step + 1);
      }
      break;
  }
}

}  // namespace mica::io::detail
