#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/core/check.h>
#include <mica/io/json.h>
#include <mica/nn/detail/most_layers.h>
#include <mica/ops/elementwise/unary.h>

namespace mica::io::detail {

// Limits above the sizes of any model, so low that products of a few of them fit in 64 bits.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;
inline constexpr std::int64_t kMostPositions = std::int64_t{1} << 31;
using nn::detail::kMostLayers;
inline constexpr std::int64_t kMostHeads = 4096;
inline constexpr std::int64_t kWidestHead = 512;  // the limit of mica::rotary
inline constexpr std::int64_t kWidest = std::int64_t{1} << 20;

/// Reads the entries of a JSON object; errors name the entry.
class ConfigEntries {
 public:
  /// `prefix` is the object's own name with a dot, for nested ones.
  ConfigEntries(const JsonValue& json, std::string what, std::string prefix = "");

  /// Null counts as absent.
  bool has(const std::string& name) const { return find(name) != nullptr; }
  /// Null does not count as absent.
  bool has_key(const std::string& name) const { return json_.find(name) != nullptr; }
  bool is_empty() const { return size() == 0; }
  std::int64_t size() const { return static_cast<std::int64_t>(json_.as<JsonValue::Object>()->size()); }
  const JsonValue* find(const std::string& name) const;

  std::int64_t count(const std::string& name, std::int64_t least, std::int64_t most,
                     std::optional<std::int64_t> absent = {}) const;
  double number(const std::string& name, double least, std::optional<double> absent = {}) const;
  double probability(const std::string& name, double absent) const;
  bool flag(const std::string& name, bool absent) const;
  std::string text(const std::string& name, std::optional<std::string> absent = {}) const;

  /// Throws unless the entry is absent or `expected`.
  void require_flag(const std::string& name, bool expected) const;
  void require_text(const std::string& name, std::string_view expected) const;
  /// Throws unless `heads`, the entry heads_name, divides `width`, the entry width_name.
  void require_divisor(const char* heads_name, std::int64_t heads, const char* width_name, std::int64_t width) const;

  /// The entry head_dim or, without it, `absent` or hidden_size / num_attention_heads. Throws unless it is even, and
  /// `key_heads`, the entry num_key_value_heads, divides `heads`, the entry num_attention_heads.
  std::int64_t head_width(std::int64_t heads, std::int64_t key_heads, std::int64_t width,
                          std::optional<std::int64_t> absent = {}) const;

  /// The value for a string entry, or for `absent` without one. Throws unless `choices` has it.
  template <class T, std::size_t N>
  T choice(const std::string& name, const std::string& absent,
           const std::array<std::pair<std::string_view, T>, N>& choices) const {
    const std::string chosen = text(name, absent);
    std::string names;
    for (const auto& [own, value] : choices) {
      if (own == chosen) {
        return value;
      }
      names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", own);
    }
    refuse(name, "one of " + names);
  }

  /// Numbers above 0, as many as `count`.
  std::vector<double> numbers(const std::string& name, std::int64_t count) const;

  const std::string& what() const { return what_; }  ///< of errors
  std::optional<ConfigEntries> nested(const std::string& name) const;

  /// Throws if an entry is an object.
  void refuse_nested(const std::string& expected) const;

  [[noreturn]] void refuse(const std::string& name, const std::string& expected) const;

 private:
  const JsonValue* find_or(const std::string& name, bool is_optional) const;

  const JsonValue& json_;
  std::string what_;
  std::string prefix_;
};

/// The name of a value among the choices of an entry.
template <class T, std::size_t N>
std::string name_of(T value, const std::array<std::pair<std::string_view, T>, N>& choices) {
  for (const auto& [name, own] : choices) {
    if (own == value) {
      return std::string(name);
    }
  }
  fail("save_pretrained: transformers has no name for this activation");
}

// Values of entries to be written.

inline JsonValue json(std::int64_t value) { return {value}; }
inline JsonValue json(double value) { return {value}; }
inline JsonValue json(bool value) { return {value}; }
inline JsonValue json(std::string value) { return {std::move(value)}; }

inline JsonValue json_list(const char* only) { return {JsonValue::Array{json(std::string(only))}}; }
template <class T>
JsonValue json_list(const std::vector<T>& values) {
  JsonValue::Array result;
  for (const T value : values) {
    result.push_back(json(value));
  }
  return {std::move(result)};
}

/// The name of GELU's tanh approximation in newer configurations; in older ones, it is gelu_new.
inline constexpr const char* kPytorchTanh = "gelu_pytorch_tanh";

inline constexpr std::array<std::pair<std::string_view, GeluApproximation>, 3> kGelus{{
    {"gelu_new", GeluApproximation::tanh},
    {kPytorchTanh, GeluApproximation::tanh},
    {"gelu", GeluApproximation::none},
}};

}  // namespace mica::io::detail
