#include <mica/io/detail/pre_tokenizer.h>

namespace mica::io::detail {

namespace {

/// Inspects the characters of a text, given their byte positions.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  struct Seen {
    char32_t code;
    std::size_t length;  // 0 at the end of the text
    Kind kind;

    bool is(Kind k) const { return length > 0 && kind == k; }
    bool is_newline() const { return length > 0 && (code == '\n' || code == '\r'); }
  };
  Seen at(std::size_t position) const {
    if (position >= text_.size()) {
      return {0, 0, Kind::other};
    }
    const Character c = character_at(text_.data() + position);
    return {c.code, c.length, kinds_.kind(c.code)};
  }

  // The end of the run of characters from `position` on that `belongs` accepts.
  template <class Belongs>
  std::size_t end_of_run(std::size_t position, const Belongs& belongs) const {
    for (Seen c = at(position); c.length > 0 && belongs(c); c = at(position)) {
      position += c.length;
    }
    return position;
  }
  std::size_t end_of_kind(std::size_t position, Kind kind) const {
    return end_of_run(position, [kind](const Seen& c) { return c.kind == kind; });
  }

  // The length of 's, 't, 're, 've, 'm, 'll or 'd at the beginning, or 0.
  std::size_t contraction(bool ignore_case) const {
    if (text_.size() < 2 || text_[0] != '\'') {
      return 0;
    }
    const auto letter = [&](std::size_t i) -> char {
      const char c = i < text_.size() ? text_[i] : '\0';
      return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    switch (letter(1)) {
      case 's':
      case 't':
      case 'm':
      case 'd': return 2;
      case 'r':
      case 'v': return letter(2) == 'e' ? 3 : 0;
      case 'l': return letter(2) == 'l' ? 3 : 0;
      default:
        // The long s (U+017F) matches s if case is ignored.
        return ignore_case && text_.substr(1).starts_with("\u017F") ? 3 : 0;
    }
  }

  // \s+(?!\S)|\s+ for spaces that end at `end`: leaves the last of several spaces to the word that follows.
  std::size_t spaces_before_word(std::size_t end) const {
    if (end == text_.size()) {
      return end;
    }
    const std::size_t last = character_before(text_, end);
    return last > 0 ? last : end;
  }

  // The end of the last newline in text[0, end), or 0.
  std::size_t after_last_newline(std::size_t end) const {
    const std::size_t newline = text_.substr(0, end).find_last_of("\r\n");
    return newline == std::string_view::npos ? 0 : newline + 1;
  }

 private:
  std::string_view text_;
  const CharacterKinds& kinds_ = CharacterKinds::get();
};

std::size_t gpt2_match(std::string_view text) {
  const Scanner scan(text);
  if (const std::size_t length = scan.contraction(false); length > 0) {
    return length;
  }
  // " ?\p{L}+", " ?\p{N}+" and " ?[^\s\p{L}\p{N}]+"
  const std::size_t word = text[0] == ' ' && text.size() > 1 ? 1 : 0;
  const Scanner::Seen first = scan.at(word);
  if (first.kind != Kind::space) {
    return scan.end_of_kind(word + first.length, first.kind);
  }
  return scan.spaces_before_word(scan.end_of_kind(0, Kind::space));
}

std::size_t llama3_match(std::string_view text, int most_digits) {
  const Scanner scan(text);
  if (const std::size_t length = scan.contraction(true); length > 0) {
    return length;
  }
  // "[^\r\n\p{L}\p{N}]?\p{L}+"
  const Scanner::Seen first = scan.at(0);
  if (first.kind == Kind::letter) {
    return scan.end_of_kind(first.length, Kind::letter);
  }
  const Scanner::Seen second = scan.at(first.length);
  if (second.is(Kind::letter) && first.kind != Kind::number && !first.is_newline()) {
    return scan.end_of_kind(first.length + second.length, Kind::letter);
  }
  // "\p{N}" or "\p{N}{1,3}"
  if (first.kind == Kind::number) {
    return scan.end_of_run(0, [&](const Scanner::Seen& c) { return c.kind == Kind::number && most_digits-- > 0; });
  }
  // " ?[^\s\p{L}\p{N}]+[\r\n]*"
  if (first.kind == Kind::other || (first.code == ' ' && second.is(Kind::other))) {
    const std::size_t end = scan.end_of_kind(first.length, Kind::other);
    return scan.end_of_run(end, [](const Scanner::Seen& c) { return c.is_newline(); });
  }
  // "\s*[\r\n]+": up to the last newline among the spaces
  const std::size_t spaces = scan.end_of_kind(0, Kind::space);
  const std::size_t lines = scan.after_last_newline(spaces);
  return lines > 0 ? lines : scan.spaces_before_word(spaces);
}

}  // namespace

std::string_view regular_expression(Pattern pattern) {
  switch (pattern) {
    case Pattern::gpt2: return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    case Pattern::llama3:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    case Pattern::qwen:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  return {};
}

std::size_t match_length(Pattern pattern, std::string_view text) {
  return pattern == Pattern::gpt2 ? gpt2_match(text) : llama3_match(text, pattern == Pattern::llama3 ? 3 : 1);
}

}  // namespace mica::io::detail
