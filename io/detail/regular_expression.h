#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace mica::io::detail {

/// A part [begin, end) of a text, in bytes.
struct Span {
  std::size_t begin, end;
};

/// What Split and Replace look for: a text or, as the package `tokenizers`, a regular expression of Oniguruma. Cheap to
/// copy, and may be used by several threads at once.
class Searched {
 public:
  Searched() = default;
  static Searched text(std::string text);
  /// Throws an Error that starts with `what` for an invalid expression, and if mica was built without Oniguruma.
  static Searched expression(const std::string& expression, const std::string& what);

  /// The text; of an expression, its source.
  const std::string& source() const { return source_; }
  bool is_expression() const { return compiled_ != nullptr; }

  /// Calls on_match(Span) for all matches in valid UTF-8, from left to right. An empty match directly after another
  /// match does not count. Throws an Error if an expression needs too many steps, which bounds its time.
  template <class OnMatch>
  void for_each_match(std::string_view text, const OnMatch& on_match) const {
    std::optional<std::size_t> last_end;
    std::size_t from = 0;
    for (std::optional<Span> match = next(text, from); match; match = next(text, from)) {
      if (match->begin == match->end && last_end == match->end) {
        if (from >= text.size()) {
          return;
        }
        from = after_character(text, from);
        continue;
      }
      from = match->end;
      last_end = match->end;
      on_match(*match);
    }
  }

  bool operator==(const Searched&) const = default;

 private:
  struct Compiled;
  std::optional<Span> next(std::string_view text, std::size_t from) const;
  static std::size_t after_character(std::string_view text, std::size_t at);

  std::string source_;
  std::shared_ptr<const Compiled> compiled_;  // null: a text
};

}  // namespace mica::io::detail
