#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/json.h>

namespace mica::io::detail {

/// Reads members of JSON objects, with errors that name the member.
class JsonReader {
 public:
  explicit JsonReader(const std::string& what) : what_(what) {}

  template <class... Args>
  void require(bool ok, fmt::format_string<Args...> message, Args&&... args) const {
    if (!ok) [[unlikely]] {
      fail("{}: {}", what_, fmt::format(message, std::forward<Args>(args)...));
    }
  }

  // Null for a member that is absent or null.
  static const JsonValue* member(const JsonValue& json, const std::string& name) {
    const JsonValue* const found = json.find(name);
    return found == nullptr || found->is_null() ? nullptr : found;
  }
  template <class T>
  const T& get(const JsonValue& json, const std::string& name, const char* kind) const {
    const JsonValue* const found = member(json, name);
    const T* const value = found == nullptr ? nullptr : found->as<T>();
    require(value != nullptr, "expected {} as \"{}\"", kind, name);
    return *value;
  }
  const std::string& text(const JsonValue& json, const std::string& name) const {
    return get<std::string>(json, name, "a text");
  }
  const JsonValue::Array& list(const JsonValue& json, const std::string& name) const {
    return get<JsonValue::Array>(json, name, "a list");
  }
  bool flag(const JsonValue& json, const std::string& name, bool otherwise) const {
    return member(json, name) == nullptr ? otherwise : get<bool>(json, name, "true or false");
  }
  std::int64_t number(const JsonValue& json, const std::string& name) const {
    return get<std::int64_t>(json, name, "a whole number");
  }

  /// The text that stands for a choice, such as "Isolated", as one of `names`, in the order of an enumeration.
  template <class Enumeration, std::size_t count>
  Enumeration choice(const JsonValue& json, const std::string& name,
                     const std::array<const char*, count>& names) const {
    const std::string& value = text(json, name);
    const auto found = std::find(names.begin(), names.end(), value);
    require(found != names.end(), "{} is {}, which is not supported", name, in_quotes(value));
    return static_cast<Enumeration>(found - names.begin());
  }
  /// Visits the steps of a Sequence, or the single step, with their types.
  template <class Visit>
  void for_each_part(const JsonValue& json, const char* list_name, Visit&& visit) const {
    if (text(json, "type") == "Sequence") {
      for (const JsonValue& part : list(json, list_name)) {
        for_each_part(part, list_name, visit);
      }
    } else {
      visit(json, text(json, "type"));
    }
  }

  const std::string& what() const { return what_; }

 private:
  const std::string& what_;
};

}  // namespace mica::io::detail
