#pragma once

// JSON. The parser is safe for untrusted files.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace mica::io {

/// A JSON value. Whole numbers that fit are int64, others double. Nested at most kDeepestJson levels deep.
struct JsonValue {
  using Array = std::vector<JsonValue>;
  using Object = std::map<std::string, JsonValue>;

  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object> value = nullptr;

  /// The value as a T, or null if it is something else.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value); }
  /// The object's member with this name; null if this is not an object or has no such member.
  const JsonValue* find(const std::string& name) const;
};

inline constexpr int kDeepestJson = 32;

/// Parses UTF-8 text. Throws an Error that starts with `what` and says what is wrong: invalid JSON (with its position),
/// a name that appears twice in an object, nesting that is too deep.
JsonValue parse_json(std::string_view text, const std::string& what);

/// Parses a file of at most `most_bytes` bytes. Errors start with "load: PATH".
JsonValue read_json(const std::filesystem::path& path, std::uint64_t most_bytes);

/// JSON text, indented by two spaces, with the members of objects sorted by name. Throws an Error for text that is not
/// UTF-8, and for infinities and NaN, which JSON lacks.
std::string to_json(const JsonValue& value);

}  // namespace mica::io
