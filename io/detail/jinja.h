#pragma once

// Templates in the language of Jinja (https://jinja.palletsprojects.com), as far as chat templates use it: loops,
// conditions, assignments, macros, filters, tests, and the methods of Python's strings and dicts. Rendered as
// transformers does, with trim_blocks and lstrip_blocks.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <mica/io/detail/jinja_value.h>

namespace mica::io::detail::jinja {

struct Body;

/// A template can do nothing but compute a text from its variables: it has no access to files, and its steps, its
/// memory and its recursion are bounded.
struct Limits {
  std::uint64_t steps = 1'000'000'000;           ///< an expression is one; so are 16 bytes of text
  std::uint64_t bytes = std::uint64_t{1} << 28;  ///< of the result, and of any other text
  std::int64_t time = -1;                        ///< for strftime_now, in seconds since 1970; −1: now
};

class Template {
 public:
  /// Throws an Error that names the line for what is not valid or not supported.
  explicit Template(std::string_view source);

  /// Throws an Error, including that of raise_exception().
  std::string render(const Dict& variables, const Limits& limits = {}) const;

 private:
  std::shared_ptr<const Body> body_;
};

}  // namespace mica::io::detail::jinja
