#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/jinja_functions.h>
#include <mica/io/detail/real_number.h>
#include <mica/io/detail/unicode.h>

namespace mica::io::detail::jinja {

namespace {

// What Python's str.isspace() accepts.
bool is_white(char32_t c) { return CharacterKinds::get().kind(c) == Kind::space || (c >= 0x1C && c <= 0x1F); }

std::u32string characters_of(std::string_view text) {
  std::u32string out;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    out += c.code;
    at += c.length;
  }
  return out;
}
std::string utf8_of(std::u32string_view characters) {
  std::string out;
  for (const char32_t c : characters) {
    append_utf8(out, c);
  }
  return out;
}

// Without the characters in `removed` at its ends; null: without white space.
std::string_view stripped(std::string_view text, const std::string* removed, bool left, bool right) {
  const std::u32string set = removed == nullptr ? std::u32string() : characters_of(*removed);
  const auto is_removed = [&](char32_t c) {
    return removed == nullptr ? is_white(c) : set.find(c) != std::u32string::npos;
  };
  while (left && !text.empty()) {
    const Character c = character_at(text.data());
    if (!is_removed(c.code)) {
      break;
    }
    text.remove_prefix(c.length);
  }
  while (right && !text.empty()) {
    const std::size_t last = character_before(text, text.size());
    if (!is_removed(character_at(text.data() + last).code)) {
      break;
    }
    text = text.substr(0, last);
  }
  return text;
}

std::string with_case(std::string_view text, bool upper) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : characters_of(text)) {
    append_utf8(out, upper ? upper_case(c) : lower_case(c));
  }
  return out;
}
std::string capitalized(std::string_view text) {
  const std::size_t first = text.empty() ? 0 : character_at(text.data()).length;
  return with_case(text.substr(0, first), true) + with_case(text.substr(first), false);
}
std::string titled(std::string_view text, bool after_any_sign) {
  std::string out;
  bool begins = true;
  for (const char32_t c : characters_of(text)) {
    append_utf8(out, begins ? upper_case(c) : lower_case(c));
    begins = after_any_sign ? CharacterKinds::get().kind(c) != Kind::letter
                            : is_white(c) || std::u32string_view(U"-([{<").find(c) != std::u32string_view::npos;
  }
  return out;
}

List split_lines(std::string_view text) {
  List lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of("\n\r\v\f\x1c\x1d\x1e"), text.size());
    lines.emplace_back(std::string(text.substr(0, end)));
    const bool has_two = end + 1 < text.size() && text[end] == '\r' && text[end + 1] == '\n';
    text.remove_prefix(std::min(end + (has_two ? 2 : 1), text.size()));
  }
  return lines;
}

List split_at_spaces(std::string_view text, std::int64_t most) {
  List parts;
  for (text = stripped(text, nullptr, true, false); !text.empty(); text = stripped(text, nullptr, true, false)) {
    std::size_t end = 0;
    if (most >= 0 && static_cast<std::int64_t>(parts.size()) >= most) {
      parts.emplace_back(std::string(stripped(text, nullptr, false, true)));
      break;
    }
    while (end < text.size() && !is_white(character_at(text.data() + end).code)) {
      end += character_at(text.data() + end).length;
    }
    parts.emplace_back(std::string(text.substr(0, end)));
    text.remove_prefix(end);
  }
  return parts;
}

List split_at(std::string_view text, std::string_view sign, std::int64_t most, bool from_right) {
  List parts;
  while (most < 0 || static_cast<std::int64_t>(parts.size()) < most) {
    const std::size_t at = from_right ? text.rfind(sign) : text.find(sign);
    if (at == std::string_view::npos) {
      break;
    }
    parts.emplace_back(std::string(from_right ? text.substr(at + sign.size()) : text.substr(0, at)));
    text = from_right ? text.substr(0, at) : text.substr(at + sign.size());
  }
  parts.emplace_back(std::string(text));
  if (from_right) {
    std::reverse(parts.begin(), parts.end());
  }
  return parts;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to, std::int64_t most) {
  std::string out;
  while (most != 0) {
    // An empty text is before each character and at the end.
    const std::size_t at = from.empty() ? 0 : text.find(from);
    if (at == std::string_view::npos) {
      break;
    }
    out += text.substr(0, at);
    out += to;
    text.remove_prefix(at + from.size());
    --most;
    if (from.empty()) {
      if (text.empty()) {
        break;
      }
      const std::size_t length = character_at(text.data()).length;
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  out += text;
  return out;
}

// A text of `width` characters, filled at both sides.
std::string padded(const std::string& text, std::int64_t width, const std::string& fill, double left_part) {
  const std::int64_t missing = std::max<std::int64_t>(0, width - length_of(text));
  const auto left = static_cast<std::int64_t>(static_cast<double>(missing) * left_part);
  std::string out;
  for (std::int64_t i = 0; i < missing; ++i) {
    if (i == left) {
      out += text;
    }
    out += fill;
  }
  return missing == left ? out + text : out;
}

template <class Belongs>
bool all_characters(std::string_view text, const Belongs& belongs) {
  const std::u32string characters = characters_of(text);
  return !characters.empty() && std::all_of(characters.begin(), characters.end(), belongs);
}
bool has_case(std::string_view text, bool upper) {
  const std::u32string characters = characters_of(text);
  const auto is_cased = [](char32_t c) { return upper_case(c) != lower_case(c); };
  return std::any_of(characters.begin(), characters.end(), is_cased) &&
         std::all_of(characters.begin(), characters.end(),
                     [&](char32_t c) { return !is_cased(c) || c == (upper ? upper_case(c) : lower_case(c)); });
}

List pairs_of(const Dict& dict) {
  List items;
  for (const Member& each : dict.members()) {
    items.push_back(Value::tuple({each.key(), each.second}));
  }
  return items;
}

Value folded(const Value& value, bool case_sensitive) {
  return !case_sensitive && value.text() != nullptr ? Value(with_case(*value.text(), false)) : value;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\'': out += "&#39;"; break;
      case '"': out += "&#34;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string indented(const std::string& text, const std::string& space, bool first, bool blank) {
  std::string out;
  bool is_first = true;
  for (const Value& line : split_lines(text + "\n")) {
    out += is_first ? "" : "\n";
    out += (is_first ? first : blank || !line.text()->empty()) ? space : "";
    out += *line.text();
    is_first = false;
  }
  return out;
}

}  // namespace

std::int64_t length_of(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

const Value* Arguments::find(std::size_t position, std::string_view name) const {
  if (position < values.size()) {
    return &values[position];
  }
  const auto found = std::find_if(named.begin(), named.end(), [&](const auto& each) { return each.first == name; });
  return found == named.end() ? nullptr : &found->second;
}

Value Arguments::get(std::size_t position, std::string_view name, const Value& otherwise) const {
  const Value* const value = find(position, name);
  return value != nullptr ? *value : otherwise;
}

bool is_dict_method(const std::string& name) {
  return name == "items" || name == "keys" || name == "values" || name == "get" || name == "copy" || name == "pop" ||
         name == "update" || name == "setdefault" || name == "popitem" || name == "clear";
}

void Machine::charge(std::uint64_t bytes) {
  if (bytes > limits_.bytes) {
    refuse(fmt::format("it makes a text of {} bytes, expected at most {}", bytes, limits_.bytes));
  }
  const std::uint64_t steps = 1 + bytes / 16;
  if (steps > steps_) {
    refuse(fmt::format("it takes more than {} steps", limits_.steps));
  }
  steps_ -= steps;
}

void Machine::refuse(const std::string& message) const { fail("chat template, line {}: {}", line, message); }

List Machine::items_of(const Value& value) {
  if (const List* const items = value.items()) {
    charge(items->size() * sizeof(Value));
    return *items;
  }
  List items;
  if (const std::string* const text = value.text()) {
    charge(text->size() * sizeof(Value));
    for (std::size_t at = 0; at < text->size();) {
      const std::size_t length = character_at(text->data() + at).length;
      items.emplace_back(text->substr(at, length));
      at += length;
    }
  } else if (const Dict* const dict = value.as<Dict>()) {
    charge(dict->members().size() * sizeof(Value));
    for (const Member& each : dict->members()) {
      items.push_back(each.key());
    }
  } else if (!value.is_undefined()) {
    refuse(fmt::format("expected a list, got {}", value.type()));
  }
  return items;
}

Value Machine::member(const Value& value, const Value& key) const {
  if (const auto* const undefined = value.as<Undefined>()) {
    refuse(fmt::format("{} is undefined", in_quotes(undefined->name)));
  }
  const std::string* const name = key.text();
  if (const Dict* const dict = value.as<Dict>()) {
    const Value* const found = dict->find_key(key);
    return found != nullptr ? *found : Value(Undefined{text_of(key)});
  }
  if (const Object* const object = value.object(); object != nullptr && name != nullptr) {
    return object->attribute(*name);
  }
  if (key.is_integer() && (value.items() != nullptr || value.text() != nullptr)) {
    const std::u32string characters = value.text() != nullptr ? characters_of(*value.text()) : std::u32string();
    const auto size = static_cast<std::int64_t>(value.items() != nullptr ? value.items()->size() : characters.size());
    const std::int64_t index = key.integer() < 0 ? key.integer() + size : key.integer();
    if (index >= 0 && index < size) {
      return value.items() != nullptr ? (*value.items())[static_cast<std::size_t>(index)]
                                      : Value(utf8_of(characters.substr(static_cast<std::size_t>(index), 1)));
    }
  }
  return Undefined{text_of(key)};
}

Value Machine::member_at(const Value& value, const Value& path) const {
  if (path.text() == nullptr) {
    return member(value, path);
  }
  Value result = value;
  for (const Value& part : split_at(*path.text(), ".", -1, false)) {
    const std::string& name = *part.text();
    const bool is_index =
        !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string::npos;
    result = member(result, is_index ? Value(static_cast<std::int64_t>(std::stoll(name))) : part);
  }
  return result;
}

bool Machine::contains(const Value& all, const Value& one) {
  if (const std::string* const text = all.text()) {
    if (one.text() == nullptr) {
      refuse(fmt::format("expected a text before \"in\" a text, got {}", one.type()));
    }
    charge(text->size());
    return text->find(*one.text()) != std::string::npos;
  }
  if (const Dict* const dict = all.as<Dict>()) {
    return dict->find_key(one) != nullptr;
  }
  const List items = items_of(all);
  return std::any_of(items.begin(), items.end(), [&](const Value& item) { return equal(item, one); });
}

Value Machine::formatted(const std::string& format, const List& values) {
  std::string out;
  std::size_t next = 0;
  for (std::size_t at = 0; at < format.size(); ++at) {
    if (format[at] != '%') {
      out += format[at];
      continue;
    }
    const std::size_t kind = format.find_first_not_of("0123456789.-+ #", at + 1);
    const std::string flags = format.substr(at + 1, kind - at - 1);
    if (kind == std::string::npos || flags.size() > 8) {
      refuse("the format is not supported");
    }
    at = kind;
    if (format[kind] == '%') {
      out += '%';
      continue;
    }
    if (next == values.size()) {
      refuse("the format has more places than there are values");
    }
    const Value& value = values[next++];
    const bool is_text = format[kind] == 's' || format[kind] == 'r';
    if (!is_text && !value.is_number()) {
      refuse(fmt::format("expected a number for %{}, got {}", format[kind], value.type()));
    }
    const auto width = [&] {
      const std::size_t dot = flags.find('.');
      std::int64_t number = 0;
      const std::string digits =
          flags.substr(flags.find_first_of("123456789") < dot ? flags.find_first_of("123456789") : flags.size());
      std::from_chars(digits.data(), digits.data() + std::min(digits.find('.'), digits.size()), number);
      return std::min<std::int64_t>(number, 1000);
    }();
    std::string text;
    if (is_text) {
      text = format[kind] == 'r' && value.text() != nullptr ? text_of(Value::list({value})) : text_of(value);
      text = format[kind] == 'r' && value.text() != nullptr ? text.substr(1, text.size() - 2) : text;
    } else if (format[kind] == 'd' || format[kind] == 'i') {
      text = std::to_string(value.is_integer() ? value.integer() : static_cast<std::int64_t>(value.real()));
    } else if (format[kind] == 'x' && value.is_integer()) {
      text = fmt::format("{:x}", value.integer());
    } else if (format[kind] == 'f' || format[kind] == 'e' || format[kind] == 'g') {
      const std::size_t dot = flags.find('.');
      int digits = 6;
      if (dot != std::string::npos) {
        digits = 0;
        std::from_chars(flags.data() + dot + 1, flags.data() + flags.size(), digits);
      }
      digits = std::min(digits, 100);
      text = format[kind] == 'f'   ? fmt::format("{:.{}f}", value.real(), digits)
             : format[kind] == 'e' ? fmt::format("{:.{}e}", value.real(), digits)
                                   : fmt::format("{:.{}g}", value.real(), digits);
    } else {
      refuse(fmt::format("the format %{} is not supported", format[kind]));
    }
    const bool zeros = !is_text && flags.starts_with('0');
    const bool negative = zeros && text.starts_with('-');
    out += negative ? "-" : "";
    out += padded(negative ? text.substr(1) : text, width - (negative ? 1 : 0), zeros ? "0" : " ",
                  flags.starts_with('-') ? 0 : 1);
    charge(out.size() / 16);
  }
  if (next < values.size()) {
    refuse("the format has fewer places than there are values");
  }
  return charged(std::move(out));
}

Value Machine::binary(const std::string& sign, const Value& left, const Value& right) {
  const auto wrong = [&]() -> Value {
    for (const Value* const value : {&left, &right}) {
      if (const auto* const undefined = value->as<Undefined>()) {
        refuse(fmt::format("{} is undefined", in_quotes(undefined->name)));
      }
    }
    refuse(fmt::format("{} {} {} is not supported", left.type(), sign, right.type()));
  };
  if (sign == "+" && left.text() != nullptr && right.text() != nullptr) {
    charge(left.text()->size() + right.text()->size());
    return Value(*left.text() + *right.text());
  }
  if (sign == "+" && left.items() != nullptr && right.items() != nullptr &&
      left.as<Sequence>()->is_tuple == right.as<Sequence>()->is_tuple) {
    charge((left.items()->size() + right.items()->size()) * sizeof(Value));
    List all = *left.items();
    all.insert(all.end(), right.items()->begin(), right.items()->end());
    return left.as<Sequence>()->is_tuple ? Value::tuple(std::move(all)) : Value::list(std::move(all));
  }
  if (sign == "%" && left.text() != nullptr) {
    const auto* const tuple = right.as<Sequence>();
    return formatted(*left.text(), tuple != nullptr && tuple->is_tuple ? *tuple->items : List{right});
  }
  if (sign == "*" && (left.is_integer() != right.is_integer())) {
    const Value& count = left.is_integer() ? left : right;
    const Value& what = left.is_integer() ? right : left;
    const auto times = static_cast<std::uint64_t>(std::max<std::int64_t>(0, count.integer()));
    if (const std::string* const text = what.text()) {
      if (times > 0 && text->size() > limits_.bytes / times) {
        refuse("a text is too long");
      }
      charge(text->size() * times);
      std::string out;
      for (std::uint64_t i = 0; i < times && !text->empty(); ++i) {
        out += *text;
      }
      return Value(std::move(out));
    }
    if (const List* const items = what.items()) {
      if (times > 0 && items->size() > limits_.bytes / sizeof(Value) / times) {
        refuse("a list is too long");
      }
      charge(items->size() * times * sizeof(Value));
      List out;
      for (std::uint64_t i = 0; i < times && !items->empty(); ++i) {
        out.insert(out.end(), items->begin(), items->end());
      }
      return Value::list(std::move(out));
    }
  }
  if (!left.is_number() || !right.is_number()) {
    return wrong();
  }
  if (left.is_integer() && right.is_integer() && sign != "/") {
    const std::int64_t a = left.integer(), b = right.integer();
    std::int64_t result = 0;
    bool is_too_large = false;
    if (sign == "+") {
      is_too_large = __builtin_add_overflow(a, b, &result);
    } else if (sign == "-") {
      is_too_large = __builtin_sub_overflow(a, b, &result);
    } else if (sign == "*") {
      is_too_large = __builtin_mul_overflow(a, b, &result);
    } else if (sign == "//" || sign == "%") {
      if (b == 0) {
        refuse("a division by zero");
      }
      is_too_large = b == -1 && a == INT64_MIN;
      if (!is_too_large) {
        const std::int64_t rest = a % b;
        const bool rounds_down = rest != 0 && (rest < 0) != (b < 0);
        result = sign == "//" ? a / b - (rounds_down ? 1 : 0) : rest + (rounds_down ? b : 0);
      }
    } else if (b >= 0) {  // **
      result = 1;
      for (std::int64_t i = 0; i < b && !is_too_large && a != 1 && !(a == 0 && i > 0); ++i) {
        if (a == -1) {
          result = b % 2 == 0 ? 1 : -1;
          break;
        }
        is_too_large = __builtin_mul_overflow(result, a, &result);
      }
    } else {
      return std::pow(static_cast<double>(a), static_cast<double>(b));
    }
    if (is_too_large) {
      refuse("a number is too large");
    }
    return result;
  }
  const double a = left.real(), b = right.real();
  if ((sign == "/" || sign == "//" || sign == "%") && b == 0) {
    refuse("a division by zero");
  }
  if (sign == "%") {
    const double rest = std::fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  }
  return sign == "+"    ? a + b
         : sign == "-"  ? a - b
         : sign == "*"  ? a * b
         : sign == "/"  ? a / b
         : sign == "//" ? std::floor(a / b)
                        : std::pow(a, b);
}

Value sliced(Machine& machine, const Value& value, const Value& from, const Value& to, const Value& step_value) {
  const std::string* const text = value.text();
  if (text == nullptr && value.items() == nullptr) {
    machine.refuse(fmt::format("expected a list or text to take a part of, got {}", value.type()));
  }
  const std::u32string characters = text != nullptr ? characters_of(*text) : std::u32string();
  const auto size = static_cast<std::int64_t>(text != nullptr ? characters.size() : value.items()->size());
  const std::int64_t step = step_value.is_none() ? 1 : step_value.is_integer() ? step_value.integer() : 0;
  if (step == 0) {
    machine.refuse("the step of a slice is zero or not a number");
  }
  const auto position = [&](const Value& own, std::int64_t otherwise) {
    if (own.is_none()) {
      return otherwise;
    }
    if (!own.is_integer()) {
      machine.refuse(fmt::format("expected whole numbers in a slice, got {}", own.type()));
    }
    std::int64_t at = own.integer();
    at = at < 0 ? std::max<std::int64_t>(at + size, step < 0 ? -1 : 0) : at;
    return std::min(at, step < 0 ? size - 1 : size);
  };
  const std::int64_t first = position(from, step < 0 ? size - 1 : 0), last = position(to, step < 0 ? -1 : size);
  machine.charge(static_cast<std::uint64_t>(size));
  std::string part;
  List items;
  for (std::int64_t at = first; step > 0 ? at < last : at > last;) {
    if (text != nullptr) {
      append_utf8(part, characters[static_cast<std::size_t>(at)]);
    } else {
      items.push_back((*value.items())[static_cast<std::size_t>(at)]);
    }
    if (__builtin_add_overflow(at, step, &at)) {
      break;
    }
  }
  return text != nullptr                  ? Value(std::move(part))
         : value.as<Sequence>()->is_tuple ? Value::tuple(std::move(items))
                                          : Value::list(std::move(items));
}

bool Machine::call_test(const std::string& name, const Value& value, const Arguments& arguments) {
  charge();
  const Value other = arguments.get(0, "other", nullptr);
  if (name == "defined" || name == "undefined") {
    return value.is_undefined() == (name == "undefined");
  }
  if (name == "none" || name == "true" || name == "false" || name == "boolean") {
    const bool* const flag = value.as<bool>();
    return name == "none" ? value.is_none() : flag != nullptr && (name == "boolean" || *flag == (name == "true"));
  }
  if (name == "string") {
    return value.text() != nullptr;
  }
  if (name == "number") {
    return value.is_number();
  }
  if (name == "integer") {
    return value.as<std::int64_t>() != nullptr;
  }
  if (name == "float") {
    return value.as<double>() != nullptr;
  }
  if (name == "mapping") {
    return value.as<Dict>() != nullptr;
  }
  if (name == "iterable" || name == "sequence") {
    return value.items() != nullptr || value.text() != nullptr || value.as<Dict>() != nullptr || value.is_undefined();
  }
  if (name == "callable") {
    return value.object() != nullptr && std::string_view(value.type()) != "namespace";
  }
  if (name == "odd" || name == "even" || name == "divisibleby") {
    const Value rest = binary("%", value, name == "divisibleby" ? other : Value(std::int64_t{2}));
    return equal(rest, Value(std::int64_t{name == "odd" ? 1 : 0}));
  }
  if (name == "lower" || name == "upper") {
    return has_case(text_of(value), name == "upper");
  }
  if (name == "eq" || name == "equalto" || name == "==" || name == "ne" || name == "!=") {
    return equal(value, other) == (name[0] != 'n' && name[0] != '!');
  }
  if (name == "sameas") {
    return std::string_view(value.type()) == other.type() && equal(value, other);
  }
  if (name == "lt" || name == "lessthan" || name == "<") {
    return compare(value, other) < 0;
  }
  if (name == "le" || name == "<=") {
    return compare(value, other) <= 0;
  }
  if (name == "gt" || name == "greaterthan" || name == ">") {
    return compare(value, other) > 0;
  }
  if (name == "ge" || name == ">=") {
    return compare(value, other) >= 0;
  }
  if (name == "in") {
    return contains(arguments.get(0, "seq", nullptr), value);
  }
  refuse(fmt::format("the test {} is not supported", in_quotes(name)));
}

Value Machine::filter_text(const std::string& name, const std::string& text, const Arguments& arguments) {
  const auto flag = [&](std::size_t at, const char* own, bool otherwise) {
    return arguments.get(at, own, otherwise).is_true();
  };
  if (name == "trim") {
    const Value removed = arguments.get(0, "chars", nullptr);
    return Value(std::string(stripped(text, removed.text(), true, true)));
  }
  if (name == "upper" || name == "lower") {
    return with_case(text, name == "upper");
  }
  if (name == "capitalize") {
    return capitalized(text);
  }
  if (name == "title") {
    return titled(text, false);
  }
  if (name == "string" || name == "safe") {
    return Value(text);
  }
  if (name == "e" || name == "escape" || name == "forceescape") {
    return charged(escaped(text));
  }
  if (name == "replace") {
    const Value count = arguments.get(2, "count", nullptr);
    return charged(replaced(text, text_of(arguments.get(0, "old", "")), text_of(arguments.get(1, "new", "")),
                            count.is_integer() ? count.integer() : -1));
  }
  if (name == "indent") {
    const Value width = arguments.get(0, "width", std::int64_t{4});
    if (width.is_integer() && width.integer() > 1000) {
      refuse("an indentation of more than 1000 spaces");
    }
    const std::string space =
        width.text() != nullptr ? *width.text()
        : width.is_integer()    ? std::string(static_cast<std::size_t>(std::max<std::int64_t>(0, width.integer())), ' ')
                                : "";
    const auto lines = static_cast<std::uint64_t>(std::count(text.begin(), text.end(), '\n') + 1);
    charge(text.size() + lines * space.size());
    return Value(indented(text, space, flag(1, "first", false), flag(2, "blank", false)));
  }
  if (name == "center") {
    const Value width = arguments.get(0, "width", std::int64_t{80});
    return charged(padded(text, std::min<std::int64_t>(width.is_integer() ? width.integer() : 80, 10'000), " ", 0.5));
  }
  if (name == "wordcount") {
    std::int64_t words = 0;
    bool is_inside = false;
    for (const char32_t c : characters_of(text)) {
      const bool is_word = CharacterKinds::get().is_word(c);
      words += is_word && !is_inside ? 1 : 0;
      is_inside = is_word;
    }
    return words;
  }
  return Undefined{};
}

Value Machine::filter_list(const std::string& name, const Value& value, const Arguments& arguments) {
  if (name == "join") {
    const std::string sign = text_of(arguments.get(0, "d", ""));
    const Value* const attribute = arguments.find(1, "attribute");
    std::string out;
    bool is_first = true;
    for (const Value& item : items_of(value)) {
      out += std::exchange(is_first, false) ? "" : sign;
      append_text(attribute != nullptr ? member_at(item, *attribute) : item, out);
      charge(out.size() / 64);
    }
    return charged(std::move(out));
  }
  if (name == "first" || name == "last") {
    const List items = items_of(value);
    return items.empty() ? Value(Undefined{name}) : name == "first" ? items.front() : items.back();
  }
  if (name == "list") {
    return Value::list(items_of(value));
  }
  if (name == "reverse") {
    List items = items_of(value);
    std::reverse(items.begin(), items.end());
    if (value.text() == nullptr) {
      return Value::list(std::move(items));
    }
    std::string text;
    for (const Value& item : items) {
      text += *item.text();
    }
    return Value(std::move(text));
  }
  if (name == "map" && !value.is_true()) {
    return Value::list({});
  }
  if (name == "map") {
    List out;
    const Value* const attribute = arguments.values.empty() ? arguments.find(0, "attribute") : nullptr;
    const Value* const otherwise = attribute != nullptr ? arguments.find(SIZE_MAX, "default") : nullptr;
    Arguments rest = arguments;
    if (attribute == nullptr) {
      if (rest.values.empty()) {
        refuse("map needs a filter or an attribute");
      }
      rest.values.erase(rest.values.begin());
    }
    for (const Value& item : items_of(value)) {
      charge();
      if (attribute != nullptr) {
        const Value found = member_at(item, *attribute);
        out.push_back(found.is_undefined() && otherwise != nullptr ? *otherwise : found);
      } else {
        out.push_back(call_filter(text_of(arguments.values[0]), item, rest));
      }
    }
    return Value::list(std::move(out));
  }
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
    if (!value.is_true()) {
      return Value::list({});
    }
    const bool of_attribute = name.ends_with("attr"), keeps = name.starts_with("select");
    Arguments rest = arguments;
    Value attribute;
    if (of_attribute) {
      attribute = arguments.get(0, "attribute", nullptr);
      rest.values.erase(rest.values.begin(), rest.values.begin() + (rest.values.empty() ? 0 : 1));
    }
    const bool has_test = !rest.values.empty();
    const std::string test = has_test ? text_of(rest.values[0]) : "";
    if (has_test) {
      rest.values.erase(rest.values.begin());
    }
    List out;
    for (const Value& item : items_of(value)) {
      charge();
      const Value own = of_attribute ? member_at(item, attribute) : item;
      if ((has_test ? call_test(test, own, rest) : own.is_true()) == keeps) {
        out.push_back(item);
      }
    }
    return Value::list(std::move(out));
  }
  if (name == "sort" || name == "unique" || name == "min" || name == "max" || name == "groupby") {
    const bool sorts = name == "sort", groups = name == "groupby";
    const bool case_sensitive = arguments.get(sorts ? 1 : groups ? 2 : 0, "case_sensitive", false).is_true();
    const Value attribute = arguments.get(sorts ? 2 : groups ? 0 : 1, "attribute", nullptr);
    struct Keyed {
      Value key, item;
    };
    std::vector<Keyed> all;
    for (const Value& item : items_of(value)) {
      charge();
      all.push_back({folded(attribute.is_none() ? item : member_at(item, attribute), case_sensitive), item});
    }
    List out;
    if (name == "unique") {
      for (const Keyed& each : all) {
        charge(all.size());
        const auto found =
            std::find_if(all.begin(), all.end(), [&](const Keyed& other) { return equal(other.key, each.key); });
        if (&*found == &each) {
          out.push_back(each.item);
        }
      }
      return Value::list(std::move(out));
    }
    charge(all.size() * 256);
    std::stable_sort(all.begin(), all.end(), [](const Keyed& a, const Keyed& b) { return compare(a.key, b.key) < 0; });
    if (name == "min" || name == "max") {
      return all.empty() ? Value(Undefined{name}) : name == "min" ? all.front().item : all.back().item;
    }
    if (groups) {
      for (std::size_t i = 0; i < all.size();) {
        List members;
        const std::size_t begin = i;
        for (; i < all.size() && equal(all[i].key, all[begin].key); ++i) {
          members.push_back(all[i].item);
        }
        out.push_back(Value::tuple({all[begin].key, Value::list(std::move(members))}));
      }
      return Value::list(std::move(out));
    }
    for (Keyed& each : all) {
      out.push_back(std::move(each.item));
    }
    if (arguments.get(0, "reverse", false).is_true()) {
      // Python keeps the order of equal items.
      std::reverse(out.begin(), out.end());
      std::reverse(all.begin(), all.end());
      for (std::size_t i = 0; i < all.size();) {
        const std::size_t begin = i;
        while (i < all.size() && compare(all[i].key, all[begin].key) == 0) {
          ++i;
        }
        std::reverse(out.begin() + static_cast<std::ptrdiff_t>(begin), out.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    return Value::list(std::move(out));
  }
  if (name == "sum") {
    const Value* const attribute = arguments.find(0, "attribute");
    Value total = arguments.get(1, "start", std::int64_t{0});
    for (const Value& item : items_of(value)) {
      total = binary("+", total, attribute != nullptr && !attribute->is_none() ? member_at(item, *attribute) : item);
    }
    return total;
  }
  if (name == "batch") {
    const Value size = arguments.get(0, "linecount", std::int64_t{1});
    const Value* const fill = arguments.find(1, "fill_with");
    if (!size.is_integer() || size.integer() < 1 || size.integer() > 1'000'000) {
      refuse("expected a number of at least 1 for batch");
    }
    List out, row;
    const auto end_row = [&] {
      out.push_back(Value::list(std::move(row)));
      row.clear();
    };
    for (Value& item : items_of(value)) {
      row.push_back(std::move(item));
      if (static_cast<std::int64_t>(row.size()) == size.integer()) {
        end_row();
      }
    }
    if (!row.empty()) {
      charge(fill != nullptr ? static_cast<std::uint64_t>(size.integer()) * sizeof(Value) : 0);
      while (fill != nullptr && static_cast<std::int64_t>(row.size()) < size.integer()) {
        row.push_back(*fill);
      }
      end_row();
    }
    return Value::list(std::move(out));
  }
  return Undefined{};
}

Value Machine::call_filter(const std::string& name, const Value& value, const Arguments& arguments) {
  charge();
  if (name == "default" || name == "d") {
    const bool replaces = value.is_undefined() || (arguments.get(1, "boolean", false).is_true() && !value.is_true());
    return replaces ? arguments.get(0, "default_value", "") : value;
  }
  if (name == "length" || name == "count") {
    if (value.as<Dict>() != nullptr) {
      return static_cast<std::int64_t>(value.as<Dict>()->members().size());
    }
    if (value.text() != nullptr) {
      charge(value.text()->size());
      return length_of(*value.text());
    }
    if (value.items() == nullptr && !value.is_undefined()) {
      refuse(fmt::format("{} has no length", value.type()));
    }
    return static_cast<std::int64_t>(value.items() == nullptr ? 0 : value.items()->size());
  }
  if (name == "tojson") {
    JsonStyle style;
    style.ascii = arguments.get(0, "ensure_ascii", false).is_true();
    const Value indent = arguments.get(1, "indent", nullptr), signs = arguments.get(2, "separators", nullptr);
    style.sorted = arguments.get(3, "sort_keys", false).is_true();
    style.indent = indent.is_integer() ? static_cast<int>(std::clamp<std::int64_t>(indent.integer(), 0, 100)) : -1;
    if (signs.items() != nullptr && signs.items()->size() == 2) {
      style.item = text_of((*signs.items())[0]);
      style.key = text_of((*signs.items())[1]);
      style.has_signs = true;
    }
    return charged(json_of(value, style));
  }
  if (name == "items") {
    const Dict* const dict = value.as<Dict>();
    if (dict == nullptr && !value.is_undefined()) {
      refuse(fmt::format("expected a dict, got {}", value.type()));
    }
    return Value::list(dict == nullptr ? List() : pairs_of(*dict));
  }
  if (name == "dictsort") {
    const Dict* const dict = value.as<Dict>();
    if (dict == nullptr) {
      refuse(fmt::format("expected a dict, got {}", value.type()));
    }
    Arguments own;
    own.values = {arguments.get(2, "reverse", false), arguments.get(0, "case_sensitive", false),
                  text_of(arguments.get(1, "by", "key")) == "value" ? Value(std::int64_t{1}) : Value(std::int64_t{0})};
    return filter_list("sort", Value::list(pairs_of(*dict)), own);
  }
  if (name == "attr") {
    return member(value, arguments.get(0, "name", nullptr));
  }
  if (name == "format") {
    return formatted(text_of(value), arguments.values);
  }
  if (name == "abs") {
    return value.is_number() && value.real() < 0 ? binary("-", Value(std::int64_t{0}), value) : value;
  }
  if (name == "int" || name == "float") {
    const bool is_int = name == "int";
    const Value otherwise = arguments.get(0, "default", is_int ? Value(std::int64_t{0}) : Value(0.0));
    double number = 0;
    if (const std::string* const text = value.text()) {
      const std::string own(stripped(*text, nullptr, true, true));
      const char* const begin = own.data() + (own.starts_with('+') ? 1 : 0);
      std::int64_t whole = 0;
      const char* const end = own.data() + own.size();
      if (const auto [last, error] = std::from_chars(begin, end, whole);
          is_int && error == std::errc() && last == end) {
        return whole;
      }
      const auto [last, error] = io::detail::real_from_chars(begin, end, number);
      if (error != std::errc() || last != end || own.empty()) {
        return otherwise;
      }
    } else if (value.is_integer() && is_int) {
      return value.integer();
    } else if (value.is_number()) {
      number = value.real();
    } else {
      return otherwise;
    }
    if (!is_int) {
      return number;
    }
    return std::abs(number) < 9e18 ? Value(static_cast<std::int64_t>(number)) : otherwise;
  }
  if (name == "round") {
    const Value digits = arguments.get(0, "precision", std::int64_t{0});
    const std::string method = text_of(arguments.get(1, "method", "common"));
    if (!value.is_number() || !digits.is_integer()) {
      refuse("expected a number to round");
    }
    const double scale = std::pow(10.0, static_cast<double>(std::clamp<std::int64_t>(digits.integer(), -300, 300)));
    const double scaled = value.real() * scale;
    const double rounded = method == "ceil"    ? std::ceil(scaled)
                           : method == "floor" ? std::floor(scaled)
                                               : std::nearbyint(scaled);
    return rounded / scale;
  }
  constexpr std::array<std::string_view, 12> of_texts{"trim", "upper",   "lower",  "capitalize", "title",     "string",
                                                      "safe", "replace", "indent", "center",     "wordcount", "escape"};
  if (std::find(of_texts.begin(), of_texts.end(), name) != of_texts.end() || name == "e" || name == "forceescape") {
    const std::string text = text_of(value);
    charge(text.size());
    return filter_text(name, text, arguments);
  }
  constexpr std::array<std::string_view, 17> of_lists{
      "join",       "first", "last",   "list", "reverse", "map",     "select", "reject", "selectattr",
      "rejectattr", "sort",  "unique", "min",  "max",     "groupby", "sum",    "batch"};
  if (std::find(of_lists.begin(), of_lists.end(), name) != of_lists.end()) {
    return filter_list(name, value, arguments);
  }
  refuse(fmt::format("the filter {} is not supported", in_quotes(name)));
}

Value Machine::text_method(const std::string& text, const std::string& name, const Arguments& arguments) {
  charge(text.size());
  const auto argument = [&](std::size_t at, const char* own) -> const std::string* {
    const Value* const value = arguments.find(at, own);
    return value == nullptr ? nullptr : value->text();
  };
  const auto needed = [&](std::size_t at, const char* own) -> const std::string& {
    const std::string* const value = argument(at, own);
    if (value == nullptr) {
      refuse(fmt::format("{} expects a text", name));
    }
    return *value;
  };
  const auto number = [&](std::size_t at, const char* own, std::int64_t otherwise) {
    const Value value = arguments.get(at, own, otherwise);
    return value.is_integer() ? value.integer() : otherwise;
  };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    return Value(std::string(stripped(text, argument(0, "chars"), name != "rstrip", name != "lstrip")));
  }
  if (name == "split" || name == "rsplit") {
    const std::string* const sign = argument(0, "sep");
    const std::int64_t most = number(1, "maxsplit", -1);
    if (sign != nullptr && sign->empty()) {
      refuse("split expects a text that is not empty");
    }
    charge(text.size() * 8);
    return Value::list(sign == nullptr ? split_at_spaces(text, most) : split_at(text, *sign, most, name == "rsplit"));
  }
  if (name == "splitlines") {
    charge(text.size() * 8);
    return Value::list(split_lines(text));
  }
  if (name == "partition" || name == "rpartition") {
    const std::string& sign = needed(0, "sep");
    const std::size_t at = name == "partition" ? text.find(sign) : text.rfind(sign);
    if (at == std::string::npos) {
      return name == "partition" ? Value::tuple({Value(text), Value(""), Value("")})
                                 : Value::tuple({Value(""), Value(""), Value(text)});
    }
    return Value::tuple({Value(text.substr(0, at)), Value(sign), Value(text.substr(at + sign.size()))});
  }
  if (name == "startswith" || name == "endswith") {
    const Value part = arguments.get(0, "prefix", nullptr);
    const List parts = part.items() != nullptr ? *part.items() : List{part};
    return std::any_of(parts.begin(), parts.end(), [&](const Value& each) {
      if (each.text() == nullptr) {
        refuse(fmt::format("{} expects a text, got {}", name, each.type()));
      }
      return name == "startswith" ? text.starts_with(*each.text()) : text.ends_with(*each.text());
    });
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const std::string& part = needed(0, "prefix");
    const bool has = name == "removeprefix" ? text.starts_with(part) : text.ends_with(part);
    return !has ? Value(text)
                : Value(name == "removeprefix" ? text.substr(part.size()) : text.substr(0, text.size() - part.size()));
  }
  if (name == "replace") {
    const std::string &from = needed(0, "old"), &to = needed(1, "new");
    const std::uint64_t places = from.empty() ? text.size() + 1 : text.size() / from.size();
    if (!to.empty() && places > limits_.bytes / to.size()) {
      refuse("a text is too long");
    }
    return charged(replaced(text, from, to, number(2, "count", -1)));
  }
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex") {
    const std::string& part = needed(0, "sub");
    const std::size_t at = name[0] == 'r' ? text.rfind(part) : text.find(part);
    if (at == std::string::npos && name.ends_with("index")) {
      refuse("the text is not found");
    }
    return at == std::string::npos ? std::int64_t{-1} : length_of(std::string_view(text).substr(0, at));
  }
  if (name == "count") {
    const std::string& part = needed(0, "sub");
    return part.empty() ? length_of(text) + 1 : static_cast<std::int64_t>(split_at(text, part, -1, false).size()) - 1;
  }
  if (name == "join") {
    Arguments own;
    own.values = {Value(text)};
    return filter_list("join", arguments.get(0, "iterable", List().empty() ? Value::list({}) : Value()), own);
  }
  if (name == "upper" || name == "lower" || name == "casefold") {
    return Value(with_case(text, name == "upper"));
  }
  if (name == "capitalize") {
    return Value(capitalized(text));
  }
  if (name == "title") {
    return Value(titled(text, true));
  }
  if (name == "isspace") {
    return all_characters(text, is_white);
  }
  if (name == "isdigit" || name == "isdecimal" || name == "isnumeric") {
    return all_characters(text, [](char32_t c) { return CharacterKinds::get().kind(c) == Kind::number; });
  }
  if (name == "isalpha") {
    return all_characters(text, [](char32_t c) { return CharacterKinds::get().kind(c) == Kind::letter; });
  }
  if (name == "isalnum") {
    return all_characters(text, [](char32_t c) {
      const Kind kind = CharacterKinds::get().kind(c);
      return kind == Kind::letter || kind == Kind::number;
    });
  }
  if (name == "isupper" || name == "islower") {
    return has_case(text, name == "isupper");
  }
  if (name == "ljust" || name == "rjust" || name == "center" || name == "zfill") {
    const std::string* const fill = argument(1, "fillchar");
    const std::int64_t width = std::min<std::int64_t>(number(0, "width", 0), 10'000);
    return charged(padded(text, width,
                          name == "zfill"   ? "0"
                          : fill != nullptr ? *fill
                                            : " ",
                          name == "ljust"    ? 0
                          : name == "center" ? 0.5
                                             : 1));
  }
  if (name == "format") {
    std::string out;
    std::size_t next = 0;
    for (std::size_t at = 0; at < text.size(); ++at) {
      const bool is_double = at + 1 < text.size() && text[at + 1] == text[at];
      if (text[at] != '{' || is_double) {
        out += text[at];
        at += is_double && (text[at] == '{' || text[at] == '}') ? 1 : 0;
        continue;
      }
      const std::size_t end = text.find('}', at);
      const std::string field = end == std::string::npos ? "" : text.substr(at + 1, end - at - 1);
      if (end == std::string::npos || field.find_first_of(".[!:") != std::string::npos) {
        refuse("this format is not supported");
      }
      const bool is_index =
          !field.empty() && field.find_first_not_of("0123456789") == std::string::npos && field.size() < 6;
      const Value* const value = field.empty() ? arguments.find(next++, "")
                                 : is_index    ? arguments.find(std::stoul(field), "")
                                               : arguments.find(SIZE_MAX, field);
      if (value == nullptr) {
        refuse("the format has more places than there are values");
      }
      append_text(*value, out);
      charge(out.size() / 16);
      at = end;
    }
    return charged(std::move(out));
  }
  refuse(fmt::format("the method {} of texts is not supported", in_quotes(name)));
}

Value Machine::call_method(const Value& value, const std::string& name, const Arguments& arguments) {
  charge();
  if (const std::string* const text = value.text()) {
    return text_method(*text, name, arguments);
  }
  if (const Dict* const dict = value.as<Dict>()) {
    if (name == "items" || name == "keys" || name == "values") {
      charge(dict->members().size() * sizeof(Member));
      List out;
      for (const Member& each : dict->members()) {
        out.push_back(name == "items"  ? Value::tuple({each.key(), each.second})
                      : name == "keys" ? each.key()
                                       : each.second);
      }
      return Value::list(std::move(out));
    }
    if (name == "get") {
      const Value* const key = arguments.find(0, "key");
      const Value* const found = key == nullptr ? nullptr : dict->find_key(*key);
      return found != nullptr ? *found : arguments.get(1, "default", nullptr);
    }
    if (name == "copy") {
      return value;
    }
  }
  if (const List* const items = value.items()) {
    const Value one = arguments.get(0, "value", nullptr);
    if (name == "index") {
      const auto found =
          std::find_if(items->begin(), items->end(), [&](const Value& item) { return equal(item, one); });
      if (found == items->end()) {
        refuse("the value is not in the list");
      }
      return static_cast<std::int64_t>(found - items->begin());
    }
    if (name == "count") {
      return static_cast<std::int64_t>(
          std::count_if(items->begin(), items->end(), [&](const Value& item) { return equal(item, one); }));
    }
    if (name == "copy") {
      return value;
    }
  }
  refuse(fmt::format("the method {} of {} is not supported", in_quotes(name), value.type()));
}

}  // namespace mica::io::detail::jinja
