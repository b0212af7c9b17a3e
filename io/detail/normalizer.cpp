#include <algorithm>
#include <bit>
#include <cstring>

#include <mica/core/check.h>
#include <mica/io/detail/normalizer.h>

namespace mica::io::detail {

namespace {

// Calls on_character(code, its bytes).
template <class OnCharacter>
void for_each_character(std::string_view text, const OnCharacter& on_character) {
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    on_character(c.code, text.substr(at, c.length));
    at += c.length;
  }
}

bool is_space(char32_t c) { return CharacterKinds::get().kind(c) == Kind::space; }

std::string_view stripped(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    const Character c = character_at(text.data());
    if (!is_space(c.code)) {
      break;
    }
    text.remove_prefix(c.length);
  }
  while (right && !text.empty()) {
    const std::size_t last = character_before(text, text.size());
    if (!is_space(character_at(text.data() + last).code)) {
      break;
    }
    text = text.substr(0, last);
  }
  return text;
}

std::string lower_case(std::string_view text) {
  const BertCharacters& characters = BertCharacters::get();
  std::string out;
  out.reserve(text.size());
  for_each_character(text, [&](char32_t c, std::string_view) {
    if (c == 0x130) {  // the only character whose lower case has two characters
      out += "i\u0307";
    } else {
      append_utf8(out, characters.lower_case(c));
    }
  });
  return out;
}

std::string replaced(std::string_view text, const Searched& searched, std::string_view by) {
  std::string out;
  out.reserve(text.size());
  std::size_t copied = 0;
  searched.for_each_match(text, [&](Span match) {
    out += text.substr(copied, match.begin - copied);
    out += by;
    copied = match.end;
  });
  out += text.substr(copied);
  return out;
}

std::string without_accents(std::string_view text) {
  std::string out;
  for_each_character(text, [&](char32_t c, std::string_view bytes) {
    if (!BertCharacters::get().is_any_mark(c)) {
      out += bytes;
    }
  });
  return out;
}

std::string without_extra_spaces(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t space = std::min(text.find(' '), text.size());
    out += text.substr(0, space);
    text.remove_prefix(std::min(text.find_first_not_of(' ', space), text.size()));
    if (!text.empty() && !out.empty()) {
      out += ' ';
    }
  }
  return out;
}

std::string nmt(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for_each_character(text, [&](char32_t c, std::string_view bytes) {
    const bool is_removed =
        (c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F;
    const bool is_other_space = c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
                                (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                                c == 0xFEFF || c == 0xFFFD;
    if (!is_removed) {
      out += is_other_space ? " " : bytes;
    }
  });
  return out;
}

}  // namespace

// The number of bytes of the double array (uint32, little-endian), the array, and the texts.
CharacterMap::CharacterMap(std::string_view bytes, const std::string& what) {
  std::uint32_t size = 0;
  check(bytes.size() >= sizeof(size), "{}: the table of characters has only {} bytes", what, bytes.size());
  std::memcpy(&size, bytes.data(), sizeof(size));
  bytes.remove_prefix(sizeof(size));
  check(size <= bytes.size() && size % sizeof(std::uint32_t) == 0 && size > 0,
        "{}: the table of characters says that {} of its {} bytes are an array of numbers", what, size, bytes.size());
  units_.resize(size / sizeof(std::uint32_t));
  std::memcpy(units_.data(), bytes.data(), size);
  texts_ = bytes.substr(size);
}

CharacterMap::Found CharacterMap::found(std::size_t length, std::uint32_t value) const {
  // A text that the table lacks is empty.
  const std::string_view from = std::string_view(texts_).substr(std::min<std::size_t>(value, texts_.size()));
  return {length, from.substr(0, from.find('\0'))};
}

// Each unit has the label of its edge in bits 0 to 7, whether it has a leaf in bit 8, and the offset of its children in
// bits 10 to 30, shifted by 8 if bit 9 is set. A leaf's unit has the value.
CharacterMap::Found CharacterMap::find(std::string_view text, bool longest) const {
  const auto offset = [](std::uint32_t unit) { return (unit >> 10) << ((unit & (1U << 9)) >> 6); };
  Found result;
  std::size_t node = offset(units_[0]);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    node ^= byte;
    if (byte == 0 || node >= units_.size() || (units_[node] & ((1U << 31) | 0xFF)) != byte) {
      break;
    }
    const std::uint32_t unit = units_[node];
    node ^= offset(unit);
    if ((unit >> 8 & 1) != 0 && node < units_.size()) {
      const bool ends_character = i + 1 == text.size() || (static_cast<unsigned char>(text[i + 1]) & 0xC0) != 0x80;
      if (ends_character) {
        result = found(i + 1, units_[node] & 0x7FFFFFFF);
      }
      if (!longest) {
        break;
      }
    }
  }
  return result;
}

std::string CharacterMap::normalized_clusters(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  const auto put = [&](std::string_view part) {
    const Found own = find(part, false);
    if (own.length > 0) {
      out += own.text;
    }
    return own.length > 0;
  };
  while (!text.empty()) {
    // An ASCII character before another one is a cluster, except for \r\n.
    const bool is_plain = static_cast<unsigned char>(text[0]) < 0x80 && text[0] != '\r' &&
                          (text.size() == 1 || static_cast<unsigned char>(text[1]) < 0x80);
    std::string_view cluster = text.substr(0, is_plain ? 1 : grapheme_length(text));
    text.remove_prefix(cluster.size());
    if (cluster.size() < 6 && put(cluster)) {
      continue;
    }
    for_each_character(cluster, [&](char32_t, std::string_view bytes) {
      if (!put(bytes)) {
        out += bytes;
      }
    });
  }
  return out;
}

std::string CharacterMap::normalized(std::string_view text, const std::vector<std::string>& kept) const {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto whole =
        std::find_if(kept.begin(), kept.end(), [&](const std::string& each) { return text.starts_with(each); });
    const Found own = whole == kept.end() ? find(text, true) : Found{};
    const std::size_t length = whole != kept.end() ? whole->size()
                               : own.length > 0    ? own.length
                                                   : character_at(text.data()).length;
    out += own.length > 0 ? own.text : text.substr(0, length);
    text.remove_prefix(length);
  }
  return out;
}

bool works_in_parts(const NormalizerStep& step) {
  using Kind = NormalizerStep::Kind;
  const bool is_one_byte =
      step.kind == Kind::replace && !step.searched.is_expression() && step.searched.source().size() == 1;
  return is_one_byte || step.kind == Kind::form || step.kind == Kind::lower_case || step.kind == Kind::strip_accents ||
         step.kind == Kind::bert || step.kind == Kind::nmt;
}

bool may_change(std::string_view text, const NormalizerStep& step) {
  switch (step.kind) {
    case NormalizerStep::Kind::form: return may_change(text, step.form);
    case NormalizerStep::Kind::prepend: return !text.empty();
    case NormalizerStep::Kind::strip: return stripped(text, step.left, step.right).size() < text.size();
    default: return true;
  }
}

std::string normalized(std::string_view text, const NormalizerStep& step) {
  switch (step.kind) {
    case NormalizerStep::Kind::form: return normal_form(text, step.form);
    case NormalizerStep::Kind::lower_case: return lower_case(text);
    case NormalizerStep::Kind::strip: return std::string(stripped(text, step.left, step.right));
    case NormalizerStep::Kind::strip_accents: return without_accents(text);
    case NormalizerStep::Kind::replace: return replaced(text, step.searched, step.text);
    case NormalizerStep::Kind::prepend: return text.empty() ? std::string() : step.text + std::string(text);
    // A damaged table may cut characters.
    case NormalizerStep::Kind::map: return repaired_utf8(step.map->normalized_clusters(text));
    case NormalizerStep::Kind::sentence_map: return repaired_utf8(step.map->normalized(text, step.kept));
    case NormalizerStep::Kind::bert: return bert_normalized(text, step.bert);
    case NormalizerStep::Kind::extra_spaces: return without_extra_spaces(text);
    case NormalizerStep::Kind::nmt: return nmt(text);
  }
  return std::string(text);
}

}  // namespace mica::io::detail
