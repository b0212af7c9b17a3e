#include <algorithm>
#include <utility>

#include <mica/io/detail/byte_alphabet.h>
#include <mica/io/detail/pre_tokenizer.h>
#include <mica/io/detail/word_piece.h>

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

namespace {

using Pieces = std::vector<std::string_view>;

/// Collects matches and the text between them, and makes pieces of them.
class Splitter {
 public:
  Splitter(std::string_view text, SplitBehavior behavior, bool is_inverted, Pieces& pieces)
      : text_(text), behavior_(behavior), is_inverted_(is_inverted), pieces_(pieces) {}

  void match(Span span) {
    if (done_ < span.begin) {
      add({done_, span.begin}, is_inverted_);
    }
    add(span, !is_inverted_);
    done_ = span.end;
  }
  void finish() {
    if (done_ < text_.size()) {
      add({done_, text_.size()}, is_inverted_);
    }
    flush();
  }

 private:
  void add(Span span, bool is_match) {
    const bool joins = has_open_ && [&] {
      switch (behavior_) {
        case SplitBehavior::merged_with_previous: return is_match && !last_is_match_;
        // Of several matches in a row, only the last is merged.
        case SplitBehavior::merged_with_next: return last_is_match_ && !is_match;
        case SplitBehavior::contiguous: return is_match == last_is_match_;
        default: return false;
      }
    }();
    if (joins) {
      open_.end = span.end;
    } else {
      flush();
      open_ = span;
      has_open_ = behavior_ != SplitBehavior::removed || !is_match;
    }
    last_is_match_ = is_match;
  }
  void flush() {
    if (has_open_ && open_.begin < open_.end) {
      pieces_.push_back(text_.substr(open_.begin, open_.end - open_.begin));
    }
    has_open_ = false;
  }

  std::string_view text_;
  SplitBehavior behavior_;
  bool is_inverted_;
  Pieces& pieces_;
  Span open_{0, 0};  // the piece that the next part may join
  bool has_open_ = false, last_is_match_ = false;
  std::size_t done_ = 0;
};

// Splits at characters: kind_of() gives the kind of each, 0 for what is removed. A negative kind is a piece of its own;
// other neighbors of the same kind form one.
template <class KindOf>
void split_by_kind(std::string_view text, Pieces& pieces, const KindOf& kind_of) {
  std::size_t begin = 0;
  int last = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    const int kind = kind_of(c.code);
    if (kind != last || kind < 0) {
      if (last != 0) {
        pieces.push_back(text.substr(begin, at - begin));
      }
      begin = at;
      last = kind;
    }
    at += c.length;
  }
  if (last != 0) {
    pieces.push_back(text.substr(begin));
  }
}

void split_metaspace(const PreTokenizerStep& step, std::string_view piece, bool is_first, std::string& storage,
                     Pieces& pieces) {
  using Prepend = PreTokenizerStep::Prepend;
  const bool may_prepend = step.prepend == Prepend::always || (step.prepend == Prepend::first && is_first);
  storage.reserve(piece.size() + piece.size() / 2 + step.text.size());
  if (may_prepend && !piece.starts_with(' ') && !piece.starts_with(step.text)) {
    storage = step.text;
  }
  while (!piece.empty()) {
    const std::size_t space = std::min(piece.find(' '), piece.size());
    storage += piece.substr(0, space);
    if (space < piece.size()) {
      storage += step.text;
    }
    piece.remove_prefix(std::min(space + 1, piece.size()));
  }
  const std::string_view text = storage;
  if (!step.splits) {
    pieces.push_back(text);
    return;
  }
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(step.text, begin + 1), text.size());
    pieces.push_back(text.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace

void split_piece(const PreTokenizerStep& step, std::string_view piece, bool is_first, std::string& storage,
                 std::vector<std::string_view>& pieces) {
  using StepKind = PreTokenizerStep::Kind;
  const CharacterKinds& kinds = CharacterKinds::get();
  switch (step.kind) {
    case StepKind::pattern: break;  // pre_tokenize() does it
    case StepKind::digits:
      split_by_kind(piece, pieces, [&](char32_t c) { return kinds.kind(c) == Kind::number ? -1 : 1; });
      break;
    case StepKind::digit_runs:
      split_by_kind(piece, pieces, [&](char32_t c) { return kinds.kind(c) == Kind::number ? 2 : 1; });
      break;
    case StepKind::leading_space:
      if (!piece.starts_with(' ')) {
        storage = " " + std::string(piece);
      }
      pieces.push_back(storage.empty() ? piece : storage);
      break;
    case StepKind::search: {
      Splitter splitter(piece, step.behavior, step.is_inverted, pieces);
      step.searched.for_each_match(piece, [&](Span match) { splitter.match(match); });
      splitter.finish();
      break;
    }
    case StepKind::punctuation: {
      Splitter splitter(piece, step.behavior, false, pieces);
      for (std::size_t at = 0; at < piece.size();) {
        const Character c = character_at(piece.data() + at);
        if (BertCharacters::get().is_punctuation(c.code)) {
          splitter.match({at, at + c.length});
        }
        at += c.length;
      }
      splitter.finish();
      break;
    }
    case StepKind::white_space:
      split_by_kind(piece, pieces, [&](char32_t c) { return kinds.kind(c) == Kind::space ? 0 : 1; });
      break;
    case StepKind::words:
      split_by_kind(piece, pieces, [&](char32_t c) {
        return kinds.is_word(c) ? 1 : kinds.kind(c) == Kind::space ? 0 : 2;
      });
      break;
    case StepKind::bert: bert_words(piece, [&](std::string_view word) { pieces.push_back(word); }); break;
    case StepKind::metaspace: split_metaspace(step, piece, is_first, storage, pieces); break;
    case StepKind::byte_characters: {
      static const ByteAlphabet alphabet;
      storage = alphabet.characters(piece);
      pieces.push_back(storage);
      break;
    }
  }
}

}  // namespace mica::io::detail
