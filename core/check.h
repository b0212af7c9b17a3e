#pragma once

// fmt assumes that nvcc lacks constexpr functions.
#if defined(__CUDACC__) && !defined(FMT_USE_CONSTEXPR)
#define FMT_USE_CONSTEXPR 1
#endif

#include <fmt/core.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace mica {

/// The type of every error that mica throws. The message starts with the name of the op and states what was expected
/// and what was given.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An allocation failed. Nothing has changed: free some memory and call again.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

namespace detail {
[[noreturn]] void throw_error(fmt::string_view message, fmt::format_args args);
}

/// Throws Error with the formatted message.
template <class... Args>
[[noreturn, gnu::cold]] void fail(fmt::format_string<Args...> message, Args&&... args) {
  detail::throw_error(message, fmt::make_format_args(args...));
}

/// Throws Error with the formatted message unless `ok`.
template <class... Args>
void check(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]] {
    fail(message, std::forward<Args>(args)...);
  }
}

namespace detail {

/// Base of mica's fmt::formatters: writes plain text, without format options.
struct TextFormatter {
  constexpr auto parse(fmt::format_parse_context& context) { return context.begin(); }

  template <class FormatContext>
  static auto write(std::string_view text, FormatContext& context) {
    return std::copy(text.begin(), text.end(), context.out());
  }
};

}  // namespace detail

}  // namespace mica
