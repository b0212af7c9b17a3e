#include <algorithm>
#include <cstring>
#include <span>
#include <unordered_map>
#include <vector>

#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

namespace {

struct Range {
  char32_t first, last;
};
struct CombiningRange {
  char32_t first, last;
  std::uint8_t order;
};
struct Decomposition {
  char32_t character, first, second;
  bool composes;
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

// Korean syllables are composed by arithmetic (Unicode 16, section 3.12).
constexpr char32_t kLeadBase = 0x1100, kVowelBase = 0x1161, kTailBase = 0x11A7, kSyllableBase = 0xAC00;
constexpr char32_t kLeads = 19, kVowels = 21, kTails = 28, kSyllables = kLeads * kVowels * kTails;

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

/// Canonical decomposition and composition.
class Normalizer {
 public:
  static const Normalizer& get() {
    static const Normalizer normalizer;
    return normalizer;
  }

  std::uint8_t order(char32_t c) const {
    const auto* const range = std::upper_bound(std::begin(kCombining), std::end(kCombining), c,
                                               [](char32_t value, const auto& r) { return value < r.first; });
    return range != std::begin(kCombining) && c <= range[-1].last ? range[-1].order : 0;
  }

  void decompose(char32_t c, std::u32string& out) const {
    if (c >= kSyllableBase && c < kSyllableBase + kSyllables) {
      const char32_t index = c - kSyllableBase, tail = index % kTails;
      out.push_back(kLeadBase + index / (kVowels * kTails));
      out.push_back(kVowelBase + index % (kVowels * kTails) / kTails);
      if (tail > 0) {
        out.push_back(kTailBase + tail);
      }
      return;
    }
    const auto found = decompositions_.find(c);
    if (found == decompositions_.end()) {
      out += c;
      return;
    }
    decompose(found->second->first, out);  // at most four levels deep
    if (found->second->second != 0) {
      out += found->second->second;  // never decomposes further
    }
  }

  // The character that is canonically equivalent to the two, or 0.
  char32_t composed(char32_t first, char32_t second) const {
    if (first >= kLeadBase && first < kLeadBase + kLeads && second >= kVowelBase && second < kVowelBase + kVowels) {
      return kSyllableBase + ((first - kLeadBase) * kVowels + (second - kVowelBase)) * kTails;
    }
    if (first >= kSyllableBase && first < kSyllableBase + kSyllables && (first - kSyllableBase) % kTails == 0 &&
        second > kTailBase && second < kTailBase + kTails) {
      return first + (second - kTailBase);
    }
    const auto found = compositions_.find(pair(first, second));
    return found == compositions_.end() ? 0 : found->second;
  }

  // Normalizes a run of characters. No character before or after it may interact with them.
  std::u32string operator()(std::u32string_view characters) const { return compose(decomposed(characters)); }

  std::u32string decomposed(std::u32string_view characters) const {
    std::u32string text;
    for (const char32_t c : characters) {
      decompose(c, text);
    }
    for (auto at = text.begin(); at != text.end();) {
      const auto end = std::find_if(at, text.end(), [&](char32_t c) { return order(c) == 0; });
      std::stable_sort(at, end, [&](char32_t a, char32_t b) { return order(a) < order(b); });
      at = end == text.end() ? end : end + 1;
    }
    return text;
  }

 private:
  Normalizer() {
    for (const Decomposition& each : kDecompositions) {
      decompositions_.emplace(each.character, &each);
      if (each.composes) {
        compositions_.emplace(pair(each.first, each.second), each.character);
      }
    }
  }

  static std::uint64_t pair(char32_t first, char32_t second) { return std::uint64_t{first} << 32 | second; }

  // Composes each character with the last starter (a character of combining class 0) before it, unless a character
  // between them has the same or a higher class.
  std::u32string compose(const std::u32string& text) const {
    std::u32string out;
    std::size_t starter = std::u32string::npos;
    std::uint8_t last = 0;  // combining class of the last character that was not composed
    for (const char32_t c : text) {
      const std::uint8_t own = order(c);
      if (starter != std::u32string::npos && (starter + 1 == out.size() || last < own)) {
        if (const char32_t both = composed(out[starter], c); both != 0) {
          out[starter] = both;
          continue;
        }
      }
      if (own == 0) {
        starter = out.size();
      }
      last = own;
      out += c;
    }
    return out;
  }

  std::unordered_map<char32_t, const Decomposition*> decompositions_;
  std::unordered_map<std::uint64_t, char32_t> compositions_;
};

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

void set_flags(std::uint8_t* flags_of, std::span<const Range> ranges, std::uint8_t flags) {
  for (const Range& range : ranges) {
    for (char32_t c = range.first; c <= range.last; ++c) {
      flags_of[c] |= flags;
    }
  }
}

}  // namespace

CharacterKinds::CharacterKinds() {
  set_flags(flags_, kLetters, static_cast<std::uint8_t>(Kind::letter) | kWord);
  set_flags(flags_, kNumbers, static_cast<std::uint8_t>(Kind::number));
  set_flags(flags_, kSpaces, static_cast<std::uint8_t>(Kind::space));
  set_flags(flags_, kOtherWords, kWord);
  for (const CombiningRange& range : kCombining) {
    set_flags(flags_, {{{range.first, range.last}}}, kMayChange | kMayDecompose);
  }
  for (const Decomposition& each : kDecompositions) {
    flags_[each.composes ? each.second : each.character] |= kMayChange;
    flags_[each.character] |= kMayDecompose;
  }
  set_flags(flags_, {{{kSyllableBase, kSyllableBase + kSyllables - 1}}}, kMayDecompose);
  set_flags(flags_, {{{kVowelBase, kVowelBase + kVowels - 1}, {kTailBase + 1, kTailBase + kTails - 1}}}, kMayChange);
}

const BertCharacters& BertCharacters::get() {
  static const BertCharacters characters;
  return characters;
}

BertCharacters::BertCharacters() {
  set_flags(flags_, kBertControls, kControl);
  set_flags(flags_, kBertPunctuation, kPunctuation);
  set_flags(flags_, kBertMarks, kMark);
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

std::u32string nfd(std::u32string_view characters) { return Normalizer::get().decomposed(characters); }

bool may_need_nfc(std::string_view text) {
  const CharacterKinds& kinds = CharacterKinds::get();
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    if (kinds.may_change(c.code)) {
      return true;
    }
    at += c.length;
  }
  return false;
}

std::string nfc(std::string_view text) {
  const CharacterKinds& kinds = CharacterKinds::get();
  const Normalizer& normalize = Normalizer::get();
  std::string out;
  out.reserve(text.size());
  std::size_t copied = 0, stable = 0;  // end of the text copied to `out`, and start of the last stable character
  for (std::size_t at = 0; at < text.size();) {
    Character c = character_at(text.data() + at);
    if (!kinds.may_change(c.code)) {
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
      if (at > begin && !kinds.may_change(c.code)) {
        break;
      }
      part += c.code;
    }
    for (const char32_t each : normalize(part)) {
      append_utf8(out, each);
    }
    copied = at;
  }
  out += text.substr(copied);
  return out;
}

}  // namespace mica::io::detail
