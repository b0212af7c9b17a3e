#include <cmath>
#include <limits>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/families/detail/config_entries.h>

namespace mica::io::detail {

namespace {

double number_of(const JsonValue& value) {
  const auto* const whole = value.as<std::int64_t>();
  const auto* const real = value.as<double>();
  return whole != nullptr  ? static_cast<double>(*whole)
         : real != nullptr ? *real
                           : std::numeric_limits<double>::quiet_NaN();
}

std::string shown(const JsonValue* value) {
  std::string text = value == nullptr ? "nothing" : to_json(*value);
  text = text.substr(0, text.find_last_not_of('\n') + 1);
  constexpr std::size_t kMostShown = 80;
  return text.size() > kMostShown ? "a longer value" : text;
}

}  // namespace

ConfigEntries::ConfigEntries(const JsonValue& json, std::string what, std::string prefix)
    : json_(json), what_(std::move(what)), prefix_(std::move(prefix)) {
  check(json.as<JsonValue::Object>() != nullptr, "{}: expected an object of entries", what_);
}

const JsonValue* ConfigEntries::find(const std::string& name) const {
  const JsonValue* const value = json_.find(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::int64_t ConfigEntries::count(const std::string& name, std::int64_t least, std::int64_t most,
                                  std::optional<std::int64_t> absent) const {
  const JsonValue* const value = find_or(name, absent.has_value());
  if (value == nullptr) {
    return *absent;
  }
  const auto* const number = value->as<std::int64_t>();
  if (number == nullptr || *number < least || *number > most) {
    refuse(name, fmt::format("a whole number from {} to {}", least, most));
  }
  return *number;
}

double ConfigEntries::number(const std::string& name, double least, std::optional<double> absent) const {
  const JsonValue* const value = find_or(name, absent.has_value());
  if (value == nullptr) {
    return *absent;
  }
  const double number = number_of(*value);
  if (!(number >= least && std::isfinite(number))) {
    refuse(name, fmt::format("a number of at least {}", least));
  }
  return number;
}

double ConfigEntries::probability(const std::string& name, double absent) const {
  const double p = number(name, 0, absent);
  if (p >= 1) {
    refuse(name, "a number in [0, 1)");
  }
  return p;
}

bool ConfigEntries::flag(const std::string& name, bool absent) const {
  const JsonValue* const value = find(name);
  if (value == nullptr) {
    return absent;
  }
  if (value->as<bool>() == nullptr) {
    refuse(name, "true or false");
  }
  return *value->as<bool>();
}

std::string ConfigEntries::text(const std::string& name, std::optional<std::string> absent) const {
  const JsonValue* const value = find_or(name, absent.has_value());
  if (value == nullptr) {
    return *absent;
  }
  if (value->as<std::string>() == nullptr) {
    refuse(name, "a text");
  }
  return *value->as<std::string>();
}

void ConfigEntries::require_flag(const std::string& name, bool expected) const {
  if (flag(name, expected) != expected) {
    refuse(name, fmt::format("{}: mica has no other", expected));
  }
}

void ConfigEntries::require_text(const std::string& name, std::string_view expected) const {
  if (text(name, std::string(expected)) != expected) {
    refuse(name, fmt::format("\"{}\": mica has no other", expected));
  }
}

std::int64_t ConfigEntries::head_width(std::int64_t heads, std::int64_t key_heads, std::int64_t width,
                                       std::optional<std::int64_t> absent) const {
  constexpr const char* kName = "head_dim";
  if (heads % key_heads != 0) {
    refuse("num_key_value_heads", fmt::format("a divisor of \"num_attention_heads\", {}", heads));
  }
  if (!has(kName) && !absent) {
    require_divisor("num_attention_heads", heads, "hidden_size", width);
    absent = width / heads;
  }
  const std::int64_t result = count(kName, 2, kWidestHead, absent);
  if (result % 2 != 0 || result > kWidestHead) {
    refuse(kName, fmt::format("an even number up to {} (or hidden_size / num_attention_heads to be one)", kWidestHead));
  }
  return result;
}

std::vector<double> ConfigEntries::numbers(const std::string& name, std::int64_t count) const {
  const std::string expected = fmt::format("{} numbers above 0", count);
  const auto* const list = find_or(name, false)->as<JsonValue::Array>();
  if (list == nullptr) {
    refuse(name, "a list of " + expected);
  }
  check(static_cast<std::int64_t>(list->size()) == count, "{}: \"{}{}\" has {} elements, expected {}", what_, prefix_,
        name, list->size(), expected);
  std::vector<double> result;
  for (const JsonValue& element : *list) {
    const double number = number_of(element);
    const auto rounded = static_cast<float>(number);  // as which frequencies are computed
    if (!(rounded > 0 && std::isfinite(rounded))) {
      fail("{}: element {} of \"{}{}\" is {}, expected a finite number above 0", what_, result.size(), prefix_, name,
           shown(&element));
    }
    result.push_back(number);
  }
  return result;
}

std::optional<ConfigEntries> ConfigEntries::nested(const std::string& name) const {
  const JsonValue* const value = find(name);
  if (value == nullptr) {
    return std::nullopt;
  }
  if (value->as<JsonValue::Object>() == nullptr) {
    refuse(name, "an object");
  }
  return ConfigEntries(*value, what_, prefix_ + name + ".");
}

void ConfigEntries::refuse_nested(const std::string& expected) const {
  for (const auto& [name, value] : *json_.as<JsonValue::Object>()) {
    if (value.as<JsonValue::Object>() != nullptr) {
      refuse(name, expected);
    }
  }
}

void ConfigEntries::refuse(const std::string& name, const std::string& expected) const {
  fail("{}: \"{}{}\" is {}, expected {}", what_, prefix_, name, shown(find(name)), expected);
}

const JsonValue* ConfigEntries::find_or(const std::string& name, bool is_optional) const {
  const JsonValue* const value = find(name);
  check(value != nullptr || is_optional, "{}: \"{}{}\" is missing", what_, prefix_, name);
  return value;
}

void ConfigEntries::require_divisor(const char* heads_name, std::int64_t heads, const char* width_name,
                                    std::int64_t width) const {
  if (width % heads != 0) {
    refuse(heads_name, fmt::format("a divisor of \"{}\", {}", width_name, width));
  }
}

}  // namespace mica::io::detail
