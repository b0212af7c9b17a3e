#include <algorithm>

#include <mica/core/check.h>
#include <mica/core/progress.h>
#include <mica/io/file.h>
#include <mica/io/text.h>

namespace mica::io {
namespace {

constexpr char32_t largest_character = 0x10FFFF;

// Decodes the character at `at` and advances; false for invalid UTF-8.
bool next_character(std::string_view text, std::size_t& at, char32_t& character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) {
    character = first;
    ++at;
    return true;
  }
  const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  if (first < 0xC2 || first > 0xF4 || text.size() - at <= static_cast<std::size_t>(more)) {
    return false;
  }
  character = first & (0x3F >> more);
  for (int i = 1; i <= more; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) {
      return false;
    }
    character = character << 6 | (byte(at + i) & 0x3F);
  }
  const char32_t smallest = more == 1 ? 0x80 : more == 2 ? 0x800 : 0x10000;
  const bool surrogate = character >= 0xD800 && character <= 0xDFFF;
  if (character < smallest || character > largest_character || surrogate) {
    return false;
  }
  at += more + 1;
  return true;
}

template <class Visit>
void for_each_character(std::string_view text, Visit&& visit, ProgressTask* progress = nullptr) {
  std::size_t reported = 0;
  const auto report = [&](std::size_t at) {
    if (progress != nullptr) {
      progress->advance(static_cast<std::int64_t>(at - reported));
      reported = at;
    }
  };
  for (std::size_t at = 0; at < text.size();) {
    char32_t character = 0;
    check(next_character(text, at, character), "from_utf8: expected UTF-8 text, got something else at byte {}", at);
    visit(character);
    if (constexpr std::size_t kReported = 1 << 16; at - reported >= kReported) {
      report(at);
    }
  }
  report(text.size());
}

}  // namespace

std::string read_text(const std::filesystem::path& path) {
  const InputFile file(path);
  std::string text(file.size(), '\0');
  ProgressTask progress("reading " + path.filename().string(), static_cast<std::int64_t>(text.size()));
  constexpr std::size_t kPiece = std::size_t{16} << 20;
  for (std::size_t at = 0; at < text.size(); at += kPiece) {
    const std::size_t bytes = std::min(kPiece, text.size() - at);
    file.read(text.data() + at, bytes, at);
    progress.advance(static_cast<std::int64_t>(bytes));
  }
  return text;
}

std::u32string from_utf8(std::string_view text) {
  std::u32string characters;
  characters.reserve(text.size());
  for_each_character(text, [&](char32_t character) { characters.push_back(character); });
  return characters;
}

std::string to_utf8(std::u32string_view characters) {
  std::string text;
  text.reserve(characters.size());
  for (const char32_t c : characters) {
    const auto put = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
    if (c < 0x80) {
      put(c);
    } else if (c < 0x800) {
      put(0xC0 | c >> 6);
      put(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
      put(0xE0 | c >> 12);
      put(0x80 | (c >> 6 & 0x3F));
      put(0x80 | (c & 0x3F));
    } else {
      check(c <= largest_character, "to_utf8: expected a Unicode character, got {}", static_cast<std::uint32_t>(c));
      put(0xF0 | c >> 18);
      put(0x80 | (c >> 12 & 0x3F));
      put(0x80 | (c >> 6 & 0x3F));
      put(0x80 | (c & 0x3F));
    }
  }
  return text;
}

CharTokenizer::CharTokenizer(std::string_view alphabet) : alphabet_(from_utf8(alphabet)) {
  check(!alphabet_.empty(), "CharTokenizer: expected an alphabet, got no characters");
  for (std::size_t i = 0; i < alphabet_.size(); ++i) {
    check(tokens_.emplace(alphabet_[i], static_cast<std::int32_t>(i)).second,
          "CharTokenizer: expected each character once, got U+{:04X} twice", static_cast<std::uint32_t>(alphabet_[i]));
  }
}

CharTokenizer CharTokenizer::of(std::string_view text) {
  std::vector<bool> is_used(largest_character + 1);
  ProgressTask progress("collecting the characters", static_cast<std::int64_t>(text.size()));
  for_each_character(
      text, [&](char32_t character) { is_used[character] = true; }, &progress);
  std::u32string alphabet;
  for (char32_t character = 0; character <= largest_character; ++character) {
    if (is_used[character]) {
      alphabet.push_back(character);
    }
  }
  return CharTokenizer(to_utf8(alphabet));
}

std::vector<std::int32_t> CharTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size());
  ProgressTask progress("tokenizing", static_cast<std::int64_t>(text.size()));
  const auto add = [&](char32_t character) {
    const auto found = tokens_.find(character);
    check(found != tokens_.end(), "encode: expected characters of the alphabet, got U+{:04X}",
          static_cast<std::uint32_t>(character));
    tokens.push_back(found->second);
  };
  for_each_character(text, add, &progress);
  return tokens;
}

std::string CharTokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::u32string characters;
  characters.reserve(tokens.size());
  for (const std::int32_t token : tokens) {
    check(token >= 0 && token < size(), "decode: expected tokens in [0, {}), got {}", size(), token);
    characters.push_back(alphabet_[token]);
  }
  return to_utf8(characters);
}

}  // namespace mica::io
