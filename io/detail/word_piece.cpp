#include <algorithm>
#include <array>
#include <utility>

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

}  // namespace

std::string bert_normalized(std::string_view text, const BertNormalization& options) {
  const CharacterKinds& kinds = CharacterKinds::get();
  const BertCharacters& characters = BertCharacters::get();
  std::string out;
  out.reserve(text.size());
  const auto put = [&](char32_t c) {
    if (options.strip_accents && characters.is_mark(c)) {
      return;
    }
    if (options.lower_case && c == 0x130) {  // the only character whose lower case has two characters
      out += "i\u0307";
    } else {
      append_utf8(out, options.lower_case ? characters.lower_case(c) : c);
    }
  };
  std::u32string changing;  // consecutive characters that form D may change
  const auto put_changing = [&] {
    for (const char32_t c : nfd(changing)) {
      put(c);
    }
    changing.clear();
  };
  const auto add = [&](char32_t c) {
    if (options.strip_accents && kinds.may_change(c, NormalForm::d)) {
      changing += c;
      return;
    }
    if (!changing.empty()) {
      put_changing();
    }
    put(c);
  };
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    at += c.length;
    if (options.clean_text && characters.is_control(c.code)) {
      continue;
    }
    if (options.clean_text && kinds.kind(c.code) == Kind::space) {
      add(U' ');
    } else if (options.separate_chinese && is_chinese(c.code)) {
      add(U' ');
      add(c.code);
      add(U' ');
    } else {
      add(c.code);
    }
  }
  put_changing();
  return out;
}

bool WordPieceEncoder::encode(std::string_view word, const Vocabulary& vocabulary,
                              std::vector<std::int64_t>& out) const {
  const auto characters =
      std::count_if(word.begin(), word.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
  if (characters > most_characters_) {
    out.push_back(unknown_);
    return false;
  }
  const std::size_t before = out.size();
  std::string piece;
  for (std::size_t begin = 0; begin < word.size();) {
    std::int64_t token = -1;
    // Longer pieces cannot be tokens.
    std::size_t end = std::min(word.size(), begin + vocabulary.most_bytes());
    if (end < word.size()) {
      end = character_before(word, end + 1);
    }
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
      return false;
    }
    out.push_back(token);
    begin = end;
  }
  return true;
}

}  // namespace mica::io::detail
