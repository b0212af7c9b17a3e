#include <algorithm>
#include <array>
#include <utility>

#include <mica/io/detail/unicode.h>
#include <mica/io/detail/word_piece.h>

namespace mica::io::detail {

namespace {

// By BERT's own definition: the blocks of ideographs, without those of Japanese and Korean scripts.
bool is_chinese(char32_t c) {
  constexpr std::array<std::pair<char32_t, char32_t>, 7> blocks{{{0x3400, 0x4DBF},
                                                                 {0x4E00, 0x9FFF},
                                                                 {0xF900, 0xFAFF},
                                                                 {0x20000, 0x2A6DF},
                                                                 {0x2A700, 0x2B81F},
                                                                 {0x2B920, 0x2CEAF},
                                                                 {0x2F800, 0x2FA1F}}};
  return std::any_of(blocks.begin(), blocks.end(),
                     [c](const auto& block) { return c >= block.first && c <= block.second; });
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

}  // namespace

std::string bert_normalized(std::string_view text, const BertNormalization& options) {
  const BertCharacters& characters = BertCharacters::get();
  std::u32string prepared;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    at += c.length;
    if (options.clean_text && characters.is_control(c.code)) {
      continue;
    }
    if (options.clean_text && CharacterKinds::get().kind(c.code) == Kind::space) {
      prepared += U' ';
    } else if (options.separate_chinese && is_chinese(c.code)) {
      prepared += {U' ', c.code, U' '};
    } else {
      prepared += c.code;
    }
  }
  if (options.strip_accents) {
    prepared = nfd(prepared);
    std::erase_if(prepared, [&](char32_t c) { return characters.is_mark(c); });
  }
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : prepared) {
    if (options.lower_case && c == 0x130) {  // the only character whose lower case has two characters
      out += "i\u0307";
    } else {
      append_utf8(out, options.lower_case ? characters.lower_case(c) : c);
    }
  }
  return out;
}

std::vector<std::string_view> bert_words(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t begin = 0;
  const auto flush = [&](std::size_t end) {
    if (begin < end) {
      words.push_back(text.substr(begin, end - begin));
    }
  };
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    const bool is_space = CharacterKinds::get().kind(c.code) == Kind::space;
    if (is_space || BertCharacters::get().is_punctuation(c.code)) {
      flush(at);
      begin = is_space ? at + c.length : at;
      if (!is_space) {
        flush(at + c.length);
        begin = at + c.length;
      }
    }
    at += c.length;
  }
  flush(text.size());
  return words;
}

void WordPieceEncoder::encode(std::string_view word, const Vocabulary& vocabulary,
                              std::vector<std::int64_t>& out) const {
  const auto characters =
      std::count_if(word.begin(), word.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
  if (characters > most_characters_) {
    out.push_back(unknown_);
    return;
  }
  const std::size_t before = out.size();
  std::string piece;
  for (std::size_t begin = 0; begin < word.size();) {
    std::int64_t token = -1;
    std::size_t end = word.size();
    for (; end > begin; end = character_before(word, end)) {
      piece.assign(prefix_, 0, begin > 0 ? prefix_.size() : 0);
      piece.append(word.substr(begin, end - begin));
      token = vocabulary.id_of_bytes(piece);  // finds no added tokens
      if (token >= 0) {
        break;
      }
    }
    if (token < 0) {
      out.resize(before);
      out.push_back(unknown_);
      return;
    }
    out.push_back(token);
    begin = end;
  }
}

std::string WordPieceEncoder::decoded(std::string_view token, bool is_first) const {
  std::string text;
  if (is_first) {
    text.append(token);
  } else if (token.starts_with(prefix_)) {
    text.append(token.substr(prefix_.size()));
  } else {
    text.push_back(' ');
    text.append(token);
  }
  if (cleans_up) {
    constexpr std::array<std::pair<const char*, const char*>, 11> rules{{{" .", "."},
                                                                         {" ?", "?"},
                                                                         {" !", "!"},
                                                                         {" ,", ","},
                                                                         {" ' ", "'"},
                                                                         {" n't", "n't"},
                                                                         {" 'm", "'m"},
                                                                         {" do not", " don't"},
                                                                         {" 's", "'s"},
                                                                         {" 've", "'ve"},
                                                                         {" 're", "'re"}}};
    for (const auto& [from, to] : rules) {
      replace_all(text, from, to);
    }
  }
  return text;
}

}  // namespace mica::io::detail
