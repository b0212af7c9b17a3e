#pragma once

// Reading real numbers. std::from_chars does it, but libc++ lacks it before version 20.

#include <locale.h>

#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string>
#include <system_error>

namespace mica::io::detail {

/// What std::from_chars(first, last, value) does, by strtod in the locale "C".
inline std::from_chars_result real_by_strtod(const char* first, const char* last, double& value) {
  static const locale_t c_locale = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string text(first, last);
  // strtod also reads blanks and a plus before the number, and hexadecimal digits.
  const std::size_t at = text.starts_with('-') ? 1 : 0;
  const bool starts = at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '.');
  if (!starts) {
    return {first, std::errc::invalid_argument};
  }
  if (text[at] == '0' && (text[at + 1] == 'x' || text[at + 1] == 'X')) {
    value = at == 0 ? 0.0 : -0.0;
    return {first + at + 1, std::errc()};
  }
  char* end = nullptr;
  errno = 0;
  const double read = strtod_l(text.c_str(), &end, c_locale);
  if (end == text.c_str()) {
    return {first, std::errc::invalid_argument};
  }
  const char* const after = first + (end - text.c_str());
  if (errno == ERANGE && (read == 0 || std::isinf(read))) {
    return {after, std::errc::result_out_of_range};
  }
  value = read;
  return {after, std::errc()};
}

/// std::from_chars(first, last, value), also where the standard library lacks it.
inline std::from_chars_result real_from_chars(const char* first, const char* last, double& value) {
#if defined(__cpp_lib_to_chars)
  return std::from_chars(first, last, value);
#else
  return real_by_strtod(first, last, value);
#endif
}

}  // namespace mica::io::detail
