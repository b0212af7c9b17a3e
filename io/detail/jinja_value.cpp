#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include <mica/core/check.h>
#include <mica/io/detail/classic_locale.h>
#include <mica/io/detail/jinja_value.h>
#include <mica/io/detail/unicode.h>
#include <mica/io/json.h>

namespace mica::io::detail::jinja {

namespace {

constexpr std::size_t kFewMembers = 16;
constexpr int kDeepestValue = 100;

int depth_around(int deepest, const Value& value) {
  const Sequence* const sequence = value.as<Sequence>();
  const Dict* const dict = value.as<Dict>();
  const int depth = sequence != nullptr ? sequence->depth : dict != nullptr ? dict->depth() : 0;
  check(depth < kDeepestValue, "chat template: lists are nested more than {} levels deep", kDeepestValue);
  return std::max(deepest, depth + 1);
}

// Python's repr() of a float.
std::string real_text(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  if (std::isinf(value)) {
    return value < 0 ? "-inf" : "inf";
  }
  const double size = std::abs(value);
  if (size != 0 && (size >= 1e16 || size < 1e-4)) {
    std::string text = fmt::format("{:e}", value);
    // The shortest digits that give the same number, and an exponent of two digits at least.
    for (int digits = 0; digits < 17; ++digits) {
      text = fmt::format("{:.{}e}", value, digits);
      if (std::stod(text) == value) {
        break;
      }
    }
    return text;
  }
  const std::string text = fmt::format("{}", value);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

bool is_printable(char32_t c) {
  const bool is_other_space = c != ' ' && CharacterKinds::get().kind(c) == Kind::space;
  return c >= 0x20 && !(c >= 0x7F && c <= 0xA0) && c != 0xAD && !is_other_space && !(c >= 0xE000 && c <= 0xF8FF) &&
         !(c >= 0x200B && c <= 0x200F) && !(c >= 0x202A && c <= 0x202E) && !(c >= 0x2060 && c <= 0x206F) && c != 0xFEFF;
}

// Python's repr() of a text.
void append_quoted(std::string_view text, std::string& out) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    if (c.code == static_cast<unsigned char>(quote) || c.code == '\\') {
      out += '\\';
      out += static_cast<char>(c.code);
    } else if (c.code == '\n') {
      out += "\\n";
    } else if (c.code == '\r') {
      out += "\\r";
    } else if (c.code == '\t') {
      out += "\\t";
    } else if (is_printable(c.code)) {
      out += text.substr(at, c.length);
    } else {
      const auto code = static_cast<std::uint32_t>(c.code);
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    }
    at += c.length;
  }
  out += quote;
}

void append_repr(const Value& value, std::string& out) {
  if (const std::string* const text = value.text()) {
    append_quoted(*text, out);
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else {
    append_text(value, out);
  }
}

void append_json_text(std::string_view text, bool ascii, std::string& out) {
  out += '"';
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text.data() + at);
    const auto code = static_cast<std::uint32_t>(c.code);
    switch (code) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\b': out += "\\b"; break;
      case '\f': out += "\\f"; break;
      default:
        if (code < 0x20 || (ascii && code >= 0x7F && code < 0x10000)) {
          out += fmt::format("\\u{:04x}", code);
        } else if (ascii && code >= 0x10000) {
          out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((code - 0x10000) >> 10), 0xDC00 + (code & 0x3FF));
        } else {
          out += text.substr(at, c.length);
        }
    }
    at += c.length;
  }
  out += '"';
}

struct JsonWriter {
  const JsonStyle& style;
  std::string& out;
  int depth = 0;

  void line() {
    if (style.indent >= 0) {
      out += '\n';
      out.append(static_cast<std::size_t>(depth) * static_cast<std::size_t>(style.indent), ' ');
    }
  }
  template <class Items, class Write>
  void all(const Items& items, char first, char last, const Write& write) {
    out += first;
    ++depth;
    for (std::size_t i = 0; i < items.size(); ++i) {
      // With an indentation, Python ends lines with "," by default.
      out += i == 0 ? "" : style.indent >= 0 && !style.has_signs ? "," : style.item;
      line();
      write(items[i]);
    }
    --depth;
    if (!items.empty()) {
      line();
    }
    out += last;
  }
  void write(const Value& value) {
    if (const std::string* const text = value.text()) {
      append_json_text(*text, style.ascii, out);
    } else if (const List* const items = value.items()) {
      all(*items, '[', ']', [this](const Value& item) { write(item); });
    } else if (const Dict* const dict = value.as<Dict>()) {
      Dict::Members members = dict->members();
      if (style.sorted) {
        std::sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      }
      all(members, '{', '}', [this](const auto& member) {
        append_json_text(member.first, style.ascii, out);
        out += style.key;
        write(member.second);
      });
    } else if (value.is_none()) {
      out += "null";
    } else if (const bool* const flag = value.as<bool>()) {
      out += *flag ? "true" : "false";
    } else if (const double* const real = value.as<double>(); real != nullptr && !std::isfinite(*real)) {
      out += std::isnan(*real) ? "NaN" : *real < 0 ? "-Infinity" : "Infinity";
    } else if (value.is_number()) {
      append_text(value, out);
    } else {
      fail("chat template: {} cannot be written as JSON", value.type());
    }
  }
};

/// Builds a Value from the parser's events.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(const std::string& what) : what_(what) { open_.emplace_back(); }

  Value result() && { return std::move(open_.front().items.front()); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override {
    return value <= INT64_MAX ? add(static_cast<std::int64_t>(value)) : add(static_cast<double>(value));
  }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool key(std::string& name) override { return open_.back().names.push_back(std::move(name)), true; }
  bool end_object() override {
    Open last = close();
    Dict::Members members;
    for (std::size_t i = 0; i < last.names.size(); ++i) {
      members.push_back({std::move(last.names[i]), std::move(last.items[i])});
    }
    return add(Dict(std::move(members)));
  }
  bool end_array() override { return add(Value::list(close().items)); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail("{}: it is not valid JSON, at byte {}", what_, position);
  }

 private:
  struct Open {
    List items;
    std::vector<std::string> names;
  };
  bool add(Value value) { return open_.back().items.push_back(std::move(value)), true; }
  bool open() {
    check(open_.size() <= kDeepestJson, "{}: it is nested more than {} levels deep", what_, kDeepestJson);
    open_.emplace_back();
    return true;
  }
  Open close() {
    Open last = std::move(open_.back());
    open_.pop_back();
    return last;
  }

  const std::string& what_;
  std::vector<Open> open_;
};

}  // namespace

Value Value::sequence(List items, bool is_tuple) {
  const int depth = std::accumulate(items.begin(), items.end(), 1, depth_around);
  return Sequence{std::make_shared<const List>(std::move(items)), is_tuple, depth};
}

Dict::Dict(Members members) {
  for (const auto& member : members) {
    depth_ = depth_around(depth_, member.second);
  }
  // Of several members with the same name, the last value counts, at the place of the first.
  std::vector<std::uint32_t> order(members.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return members[a].first < members[b].first; });
  const bool has_doubles = std::adjacent_find(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
                             return members[a].first == members[b].first;
                           }) != order.end();
  if (has_doubles) {
    std::vector<bool> is_removed(members.size());
    std::uint32_t first = order[0];
    for (std::size_t i = 1; i < order.size(); ++i) {
      if (members[order[i]].first == members[first].first) {
        members[first].second = members[order[i]].second;
        is_removed[order[i]] = true;
      } else {
        first = order[i];
      }
    }
    Members kept;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (!is_removed[i]) {
        kept.push_back(std::move(members[i]));
      }
    }
    members = std::move(kept);
    order.resize(members.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t a, std::uint32_t b) { return members[a].first < members[b].first; });
  }
  members_ = std::make_shared<const Members>(std::move(members));
  if (members_->size() > kFewMembers) {
    sorted_ = std::make_shared<const std::vector<std::uint32_t>>(std::move(order));
  }
}

const Value* Dict::find(std::string_view key) const {
  const Members& all = *members_;
  if (sorted_ == nullptr) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& member) { return member.first == key; });
    return found == all.end() ? nullptr : &found->second;
  }
  const auto found = std::lower_bound(sorted_->begin(), sorted_->end(), key,
                                      [&](std::uint32_t index, std::string_view k) { return all[index].first < k; });
  return found == sorted_->end() || all[*found].first != key ? nullptr : &all[*found].second;
}

const Value* Dict::find_key(const Value& key) const {
  return key.text() != nullptr ? find(*key.text()) : key.is_integer() ? find(std::to_string(key.integer())) : nullptr;
}

Value Member::key() const {
  std::int64_t number = 0;
  if (is_number && std::from_chars(first.data(), first.data() + first.size(), number).ec == std::errc()) {
    return number;
  }
  return first;
}

std::int64_t Value::integer() const {
  const bool* const flag = as<bool>();
  return flag != nullptr ? static_cast<std::int64_t>(*flag) : *as<std::int64_t>();
}

double Value::real() const {
  const double* const real = as<double>();
  return real != nullptr ? *real : static_cast<double>(integer());
}

bool Value::is_true() const {
  if (is_number()) {
    return real() != 0;
  }
  if (const std::string* const own = text()) {
    return !own->empty();
  }
  if (const List* const own = items()) {
    return !own->empty();
  }
  if (const Dict* const own = as<Dict>()) {
    return !own->members().empty();
  }
  return object() != nullptr;
}

const char* Value::type() const {
  constexpr const char* names[] = {"None", "bool", "int", "float", "str", "list", "dict", "object", "undefined"};
  const Sequence* const sequence = as<Sequence>();
  return sequence != nullptr && sequence->is_tuple ? "tuple"
         : object() != nullptr                     ? object()->kind()
                                                   : names[value_.index()];
}

void append_text(const Value& value, std::string& out) {
  if (const std::string* const text = value.text()) {
    out += *text;
  } else if (value.is_none()) {
    out += "None";
  } else if (const bool* const flag = value.as<bool>()) {
    out += *flag ? "True" : "False";
  } else if (const auto* const integer = value.as<std::int64_t>()) {
    out += std::to_string(*integer);
  } else if (const double* const real = value.as<double>()) {
    out += real_text(*real);
  } else if (const Sequence* const sequence = value.as<Sequence>()) {
    out += sequence->is_tuple ? '(' : '[';
    for (std::size_t i = 0; i < sequence->items->size(); ++i) {
      out += i == 0 ? "" : ", ";
      append_repr((*sequence->items)[i], out);
    }
    out += sequence->is_tuple ? (sequence->items->size() == 1 ? ",)" : ")") : "]";
  } else if (const Dict* const dict = value.as<Dict>()) {
    out += '{';
    for (std::size_t i = 0; i < dict->members().size(); ++i) {
      out += i == 0 ? "" : ", ";
      append_repr(dict->members()[i].key(), out);
      out += ": ";
      append_repr(dict->members()[i].second, out);
    }
    out += '}';
  } else if (const Object* const object = value.object()) {
    out += fmt::format("<{}>", object->kind());
  }
}

std::string text_of(const Value& value) {
  std::string text;
  append_text(value, text);
  return text;
}

std::string json_of(const Value& value, const JsonStyle& style) {
  std::string out;
  JsonWriter{style, out}.write(value);
  return out;
}

Value parse(std::string_view json, const std::string& what) {
  Builder builder(what);
  const ClassicLocale locale;
  nlohmann::json::sax_parse(json.begin(), json.end(), &builder);
  return std::move(builder).result();
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    return a.is_integer() && b.is_integer() ? a.integer() == b.integer() : a.real() == b.real();
  }
  if (a.text() != nullptr && b.text() != nullptr) {
    return *a.text() == *b.text();
  }
  const auto* const one = a.as<Sequence>();
  const auto* const other = b.as<Sequence>();
  if (one != nullptr && other != nullptr) {
    return one->is_tuple == other->is_tuple &&
           std::equal(one->items->begin(), one->items->end(), other->items->begin(), other->items->end(), equal);
  }
  if (a.as<Dict>() != nullptr && b.as<Dict>() != nullptr) {
    const Dict::Members& members = a.as<Dict>()->members();
    return members.size() == b.as<Dict>()->members().size() &&
           std::all_of(members.begin(), members.end(), [&](const auto& member) {
             const Value* const found = b.as<Dict>()->find(member.first);
             return found != nullptr && equal(member.second, *found);
           });
  }
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined()) ||
         (a.object() != nullptr && a.object() == b.object());
}

int compare(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_integer() && b.is_integer()) {
      return a.integer() < b.integer() ? -1 : a.integer() > b.integer();
    }
    return a.real() < b.real() ? -1 : a.real() > b.real();
  }
  if (a.text() != nullptr && b.text() != nullptr) {
    return a.text()->compare(*b.text());  // UTF-8 has the order of its characters
  }
  if (a.items() != nullptr && b.items() != nullptr) {
    for (std::size_t i = 0; i < std::min(a.items()->size(), b.items()->size()); ++i) {
      if (!equal((*a.items())[i], (*b.items())[i])) {
        return compare((*a.items())[i], (*b.items())[i]);
      }
    }
    return compare(static_cast<std::int64_t>(a.items()->size()), static_cast<std::int64_t>(b.items()->size()));
  }
  fail("chat template: {} and {} cannot be ordered", a.type(), b.type());
}

}  // namespace mica::io::detail::jinja
