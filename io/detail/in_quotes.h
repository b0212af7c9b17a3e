#pragma once

#include <string>
#include <string_view>

#include <mica/io/detail/unicode.h>

namespace mica::io::detail {

/// Quotes text from a file for an error message: in quotation marks, and shortened if it is long.
inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t most = 60;
  const bool is_long = text.size() > most;
  text = text.substr(0, most);
  text = is_long ? text.substr(0, complete_utf8_length(text)) : text;
  return "\"" + std::string(text) + (is_long ? "…\"" : "\"");
}

}  // namespace mica::io::detail
