#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <type_traits>
#include <variant>

#include <mica/io/detail/gguf_entries.h>
#include <mica/io/detail/real_number.h>

namespace mica::io::detail {

namespace {

// The double nearest to the shortest decimal that rounds to x.
double as_written(float x) {
  fmt::memory_buffer text;  // unlike strtod, fmt and from_chars do not depend on the locale
  fmt::format_to(std::back_inserter(text), "{}", x);
  double value = x;
  real_from_chars(text.begin(), text.end(), value);
  return value;
}

}  // namespace

std::optional<std::int64_t> GgufEntries::integer(const std::string& key) const {
  const auto at = metadata_.find(key);
  if (at == metadata_.end()) {
    return std::nullopt;
  }
  const std::optional<std::int64_t> value = std::visit(
      []<class T>(const T& held) -> std::optional<std::int64_t> {
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
          if (std::in_range<std::int64_t>(held)) {
            return static_cast<std::int64_t>(held);
          }
        }
        return std::nullopt;
      },
      at->second);
  check(value.has_value(), "{}: expected \"{}\" to be a whole number", what_, key);
  return value;
}

std::optional<double> GgufEntries::number(const std::string& key) const {
  const auto at = metadata_.find(key);
  if (at == metadata_.end()) {
    return std::nullopt;
  }
  double value = 0;
  if (const auto* const single = std::get_if<float>(&at->second)) {
    value = as_written(*single);
  } else if (const auto* const exact = std::get_if<double>(&at->second)) {
    value = *exact;
  } else {
    value = static_cast<double>(*integer(key));
  }
  check(std::isfinite(value), "{}: expected \"{}\" to be finite", what_, key);
  return value;
}

}  // namespace mica::io::detail
