#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

namespace {

struct Range {
  char32_t first, last;
};
/// Characters first, first + step, … last; the lower case of each is `difference` higher.
struct LowerCase {
  char32_t first, last, step;
  std::int32_t difference;
};

#include "unicode_tables.inc"

// White_Space
constexpr Range kSpaces[] = {{0x09, 0x0D},     {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
                             {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};

// Korean vowels and final consonants, which compose with what is before them, and syllables, which decompose.
constexpr Range kVowels{0x1161, 0x1175}, kTails{0x11A8, 0x11C2}, kSyllables{0xAC00, 0xD7A3};

// The length of a character and the valid range of its second byte, by its lead byte (table 3-7 of the Unicode
// Standard). Third and fourth bytes are 80…BF.
struct Lead {
  int length;  // 0: no character begins with this byte
  unsigned char lowest, highest;
};
Lead lead_of(unsigned char byte) {
  if (byte < 0xC2 || byte > 0xF4) {
    return {byte < 0x80 ? 1 : 0, 0, 0};
  }
  if (byte < 0xE0) {
    return {2, 0x80, 0xBF};
  }
  if (byte < 0xF0) {
    return {3, static_cast<unsigned char>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<unsigned char>(byte == 0xED ? 0x9F : 0xBF)};
  }
  return {4, static_cast<unsigned char>(byte == 0xF0 ? 0x90 : 0x80),
          static_cast<unsigned char>(byte == 0xF4 ? 0x8F : 0xBF)};
}

struct Sequence {
  std::size_t length;  // of the longest valid prefix of a character; at least 1
  bool is_complete;
};
Sequence sequence_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const Lead lead = lead_of(byte(at));
  if (lead.length <= 1) {
    return {1, lead.length == 1};
  }
  std::size_t length = 1;
  unsigned char lowest = lead.lowest, highest = lead.highest;
  while (length < static_cast<std::size_t>(lead.length) && at + length < text.size() && byte(at + length) >= lowest &&
         byte(at + length) <= highest) {
    ++length;
    lowest = 0x80, highest = 0xBF;
  }
  return {length, length == static_cast<std::size_t>(lead.length)};
}

bool composes(NormalForm form) { return form == NormalForm::c || form == NormalForm::kc; }

/// Unlike a whole-text function of utf8proc, takes linear time: it bubbles marks into order.
std::u32string decomposed(std::u32string_view characters, NormalForm form) {
  const bool is_canonical = form == NormalForm::c || form == NormalForm::d;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (is_canonical ? 0 : UTF8PROC_COMPAT));
  std::array<utf8proc_int32_t, 32> parts{};  // at most 18
  std::u32string text;
  for (const char32_t c : characters) {
    int state = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts.data(), parts.size(), options, &state);
    text.append(parts.begin(), parts.begin() + count);
  }
  const auto order = [](char32_t c) {
    return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
  };
  for (auto at = text.begin(); at != text.end();) {
    const auto end = std::find_if(at, text.end(), [&](char32_t c) { return order(c) == 0; });
    std::stable_sort(at, end, [&](char32_t a, char32_t b) { return order(a) < order(b); });
    at = end == text.end() ? end : end + 1;
  }
  return text;
}

// Normalizes a run of characters. No character before or after it may interact with them.
std::u32string normalized_run(std::u32string_view characters, NormalForm form) {
  std::u32string text = decomposed(characters, form);
  if (composes(form)) {
    std::vector<utf8proc_int32_t> buffer(text.begin(), text.end());
    const auto length = utf8proc_normalize_utf32(buffer.data(), static_cast<utf8proc_ssize_t>(buffer.size()),
                                                 static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    text.assign(buffer.begin(), buffer.begin() + length);
  }
  return text;
}

}  // namespace

std::size_t valid_utf8_length(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    // Eight ASCII bytes at a time.
    std::uint64_t eight = 0;
    while (text.size() - at >= 8) {
      std::memcpy(&eight, text.data() + at, 8);
      if ((eight & 0x8080808080808080U) != 0) {
        break;
      }
      at += 8;
    }
    if (at == text.size()) {
      break;
    }
    const Sequence sequence = sequence_at(text, at);
    if (!sequence.is_complete) {
      return at;
    }
    at += sequence.length;
  }
  return at;
}

std::string repaired_utf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size());
  while (!text.empty()) {
    const std::size_t valid = valid_utf8_length(text);
    repaired += text.substr(0, valid);
    text.remove_prefix(valid);
    if (!text.empty()) {
      repaired += "\uFFFD";
      text.remove_prefix(sequence_at(text, 0).length);
    }
  }
  return repaired;
}

std::size_t complete_utf8_length(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const std::size_t at = text.size() - back;
    const auto byte = static_cast<unsigned char>(text[at]);
    if ((byte & 0xC0) != 0x80) {
      const bool is_begun = lead_of(byte).length > static_cast<int>(back) && sequence_at(text, at).length == back;
      return is_begun ? at : text.size();
    }
  }
  return text.size();
}

void append_utf8(std::string& text, char32_t character) {
  const auto put = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (character < 0x80) {
    put(character);
  } else if (character < 0x800) {
    put(0xC0 | character >> 6);
    put(0x80 | (character & 0x3F));
  } else if (character < 0x10000) {
    put(0xE0 | character >> 12);
    put(0x80 | (character >> 6 & 0x3F));
    put(0x80 | (character & 0x3F));
  } else {
    put(0xF0 | character >> 18);
    put(0x80 | (character >> 12 & 0x3F));
    put(0x80 | (character >> 6 & 0x3F));
    put(0x80 | (character & 0x3F));
  }
}

const CharacterKinds& CharacterKinds::get() {
  static const CharacterKinds kinds;
  return kinds;
}

namespace {

void set_flags(std::uint8_t* flags_of, std::span<const Range> ranges, int flags) {
  for (const Range& range : ranges) {
    for (char32_t c = range.first; c <= range.last; ++c) {
      flags_of[c] |= static_cast<std::uint8_t>(flags);
    }
  }
}

}  // namespace

CharacterKinds::CharacterKinds() {
  set_flags(flags_, kLetters, static_cast<std::uint8_t>(Kind::letter) | kWord);
  set_flags(flags_, kNumbers, static_cast<std::uint8_t>(Kind::number));
  set_flags(flags_, kSpaces, static_cast<std::uint8_t>(Kind::space));
  set_flags(flags_, kOtherWords, kWord);
  set_flags(flags_, {{kVowels, kTails}}, changes_in(NormalForm::c) | changes_in(NormalForm::kc));
  set_flags(flags_, {{kSyllables}}, changes_in(NormalForm::d) | changes_in(NormalForm::kd));
  constexpr std::array<NormalForm, 4> forms{NormalForm::c, NormalForm::d, NormalForm::kc, NormalForm::kd};
  std::vector<bool> is_later(std::size(flags_));
  for (const Range& range : kLater) {
    std::fill(is_later.begin() + range.first, is_later.begin() + range.last + 1, true);
  }
  for (char32_t c = 0; c < std::size(flags_); ++c) {
    const utf8proc_property_t& property = *utf8proc_get_property(static_cast<utf8proc_int32_t>(c));
    const bool decomposes = property.decomp_seqindex != UINT16_MAX;
    if (is_later[c] || (property.combining_class == 0 && !decomposes)) {
      continue;
    }
    for (const NormalForm form : forms) {
      const std::u32string itself(1, c);
      if (property.combining_class != 0 || normalized_run(itself, form) != itself) {
        flags_[c] |= changes_in(form);
      } else if (const std::u32string parts = decomposed(itself, form); composes(form) && parts.size() > 1) {
        flags_[parts.back()] |= changes_in(form);  // composes with what is before it
      }
    }
  }
}

const BertCharacters& BertCharacters::get() {
  static const BertCharacters characters;
  return characters;
}

BertCharacters::BertCharacters() {
  set_flags(flags_, kBertControls, kControl);
  set_flags(flags_, kBertPunctuation, kPunctuation);
  set_flags(flags_, kBertMarks, kBertMark);
  set_flags(flags_, kMarks, kMark);
  for (const LowerCase& range : kLowerCase) {
    for (char32_t c = range.first; c <= range.last; c += range.step) {
      flags_[c] |= kUpper;
    }
  }
}

char32_t BertCharacters::lower_case(char32_t character) const {
  if ((flags_[character] & kUpper) == 0) {
    return character;
  }
  for (const LowerCase& range : kLowerCase) {
    if (character >= range.first && character <= range.last && (character - range.first) % range.step == 0) {
      return character + static_cast<char32_t>(range.difference);
    }
  }
  return character;
}

char32_t upper_case(char32_t character) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(character)));
}
char32_t lower_case(char32_t character) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character)));
}

std::u32string nfd(std::u32string_view characters) { return decomposed(characters, NormalForm::d); }

bool may_change(std::string_view text, NormalForm form) {
  const CharacterKinds& kinds = CharacterKinds::get();
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    if (kinds.may_change(c.code, form)) {
      return true;
    }
    at += c.length;
  }
  return false;
}

std::string normal_form(std::string_view text, NormalForm form) {
  const CharacterKinds& kinds = CharacterKinds::get();
  std::string out;
  out.reserve(text.size());
  std::size_t copied = 0, stable = 0;  // end of the text copied to `out`, and start of the last stable character
  for (std::size_t at = 0; at < text.size();) {
    Character c = character_at(text.data() + at);
    if (!kinds.may_change(c.code, form)) {
      stable = at;
      at += c.length;
      continue;
    }
    // A part is a stable character, which can change only together with others, and the characters after it that may
    // change.
    const std::size_t begin = std::max(copied, stable);
    out += text.substr(copied, begin - copied);
    std::u32string part;
    for (at = begin; at < text.size(); at += c.length) {
      c = character_at(text.data() + at);
      const bool is_stable = !kinds.may_change(c.code, form);
      if (at > begin && is_stable) {
        break;
      }
      if (is_stable && normalized_run(std::u32string(1, c.code), form) != std::u32string(1, c.code)) {
        append_utf8(out, c.code);  // only later versions of Unicode normalize it
      } else {
        part += c.code;
      }
    }
    for (const char32_t each : normalized_run(part, form)) {
      append_utf8(out, each);
    }
    copied = at;
  }
  out += text.substr(copied);
  return out;
}

std::size_t grapheme_length(std::string_view text) {
  utf8proc_int32_t state = 0;
  Character c = character_at(text.data());
  std::size_t length = c.length;
  while (length < text.size()) {
    const Character next = character_at(text.data() + length);
    if (utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(c.code),
                                         static_cast<utf8proc_int32_t>(next.code), &state)) {
      break;
    }
    length += next.length;
    c = next;
  }
  return length;
}

}  // namespace mica::io::detail
