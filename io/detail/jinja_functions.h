#pragma once

// Filters, tests and methods of Jinja's values.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <mica/io/detail/jinja.h>
#include <mica/io/detail/jinja_value.h>

namespace mica::io::detail::jinja {

struct Arguments {
  List values;
  std::vector<std::pair<std::string, Value>> named;

  /// The argument at a position, or with a name; null if it is absent.
  const Value* find(std::size_t position, std::string_view name) const;
  Value get(std::size_t position, std::string_view name, const Value& otherwise) const;
};

/// What functions need of the program that runs.
class Machine {
 public:
  explicit Machine(const Limits& limits) : limits_(limits), steps_(limits.steps) {}
  virtual ~Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Counts the work for a text or list of `bytes` bytes, and one step. Throws an Error if it is too much.
  void charge(std::uint64_t bytes = 0);
  template <class Text>
  Value charged(Text&& text) {
    charge(text.size());
    return Value(std::string(std::forward<Text>(text)));
  }
  [[noreturn]] void refuse(const std::string& message) const;
  const Limits& limits() const { return limits_; }

  Value call_filter(const std::string& name, const Value& value, const Arguments& arguments);
  bool call_test(const std::string& name, const Value& value, const Arguments& arguments);
  /// A method of a text, list or dict.
  Value call_method(const Value& value, const std::string& name, const Arguments& arguments);

  /// The elements that a loop visits: of a list, the characters of a text, the keys of a dict, nothing for undefined.
  List items_of(const Value& value);
  /// value.name or value["name"]; undefined if there is none.
  Value member(const Value& value, const Value& key) const;
  Value binary(const std::string& sign, const Value& left, const Value& right);
  bool contains(const Value& all, const Value& one);

  int line = 0;

 protected:
  virtual Value call(const Value& function, const Arguments& arguments) = 0;

 private:
  Value member_at(const Value& value, const Value& path) const;  // "a.b.0"
  Value filter_text(const std::string& name, const std::string& text, const Arguments& arguments);
  Value filter_list(const std::string& name, const Value& value, const Arguments& arguments);
  Value text_method(const std::string& text, const std::string& name, const Arguments& arguments);
  Value formatted(const std::string& format, const List& values);

  Limits limits_;
  std::uint64_t steps_;
};

bool is_dict_method(const std::string& name);

/// The number of characters.
std::int64_t length_of(std::string_view text);
/// Elements or characters [from:to:step], as Python's slices; none are absent.
Value sliced(Machine& machine, const Value& value, const Value& from, const Value& to, const Value& step);

}  // namespace mica::io::detail::jinja
