#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/gguf_types.h>

namespace mica::io::detail {

/// Values of a GGUF file's metadata by key. Errors start with `what` and name the key.
class GgufEntries {
 public:
  GgufEntries(const GgufMetadata& metadata, std::string what) : metadata_(metadata), what_(std::move(what)) {}

  const std::string& what() const { return what_; }
  bool has(const std::string& key) const { return metadata_.contains(key); }

  /// The value, of type T; null if there is none. Throws if it has another type; `kind` describes the expected one.
  template <class T>
  const T* find(const std::string& key, const char* kind) const {
    const auto at = metadata_.find(key);
    if (at == metadata_.end()) {
      return nullptr;
    }
    const T* const value = std::get_if<T>(&at->second);
    check(value != nullptr, "{}: expected \"{}\" to be {}", what_, key, kind);
    return value;
  }
  /// The value if it is of type T; otherwise null.
  template <class T>
  const T* find_as(const std::string& key) const {
    const auto at = metadata_.find(key);
    return at == metadata_.end() ? nullptr : std::get_if<T>(&at->second);
  }
  const std::string& text(const std::string& key) const { return *needed(key, find<std::string>(key, "a text")); }
  /// A value of any integer type.
  std::optional<std::int64_t> integer(const std::string& key) const;
  /// A value of any numeric type. A float32 becomes the shortest decimal that rounds to it, since that was meant:
  /// 1e-5.
  std::optional<double> number(const std::string& key) const;

  /// Throws if there is no value.
  template <class T>
  T needed(const std::string& key, std::optional<T> value) const {
    check(value.has_value(), "{}: the metadata lack \"{}\"", what_, key);
    return *value;
  }
  template <class T>
  const T* needed(const std::string& key, const T* value) const {
    check(value != nullptr, "{}: the metadata lack \"{}\"", what_, key);
    return value;
  }

 private:
  const GgufMetadata& metadata_;
  std::string what_;
};

}  // namespace mica::io::detail
