#pragma once

// The values of Jinja templates: Python's, as far as templates see them.

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace mica::io::detail::jinja {

class Value;
struct Member;
using List = std::vector<Value>;

/// A variable or attribute that does not exist. Printing it gives nothing; computing with it is an error.
struct Undefined {
  std::string name;
};
/// A list or, as Python prints it differently, a tuple.
struct Sequence {
  std::shared_ptr<const List> items;
  bool is_tuple = false;
  int depth = 1;  ///< of nested lists and dicts
};
/// A dict, which keeps the order of its members. Lookups are linear for few members, and by binary search otherwise.
class Dict {
 public:
  using Members = std::vector<Member>;
  explicit Dict(Members members);

  const Members& members() const& { return *members_; }
  const Members& members() const&& = delete;
  int depth() const { return depth_; }
  /// Null if there is none.
  const Value* find(std::string_view key) const;
  const Value* find_key(const Value& key) const;

 private:
  std::shared_ptr<const Members> members_;
  std::shared_ptr<const std::vector<std::uint32_t>> sorted_;  // indices, by key; null for few members
  int depth_ = 1;
};

/// An object that templates see: a loop, a namespace, a macro.
class Object {
 public:
  virtual ~Object() = default;
  virtual const char* kind() const = 0;
  /// Undefined if there is no such attribute.
  virtual Value attribute(const std::string& name) const = 0;
};

class Value {
 public:
  using Variant = std::variant<std::nullptr_t, bool, std::int64_t, double, std::shared_ptr<const std::string>, Sequence,
                               Dict, std::shared_ptr<Object>, Undefined>;

  Value() : value_(nullptr) {}
  Value(std::nullptr_t) : value_(nullptr) {}    // NOLINT(google-explicit-constructor)
  Value(bool value) : value_(value) {}          // NOLINT(google-explicit-constructor)
  Value(std::int64_t value) : value_(value) {}  // NOLINT(google-explicit-constructor)
  Value(double value) : value_(value) {}        // NOLINT(google-explicit-constructor)
  Value(std::string text)
      : value_(std::make_shared<const std::string>(std::move(text))) {}  // NOLINT(google-explicit-constructor)
  Value(const char* text) : Value(std::string(text)) {}                  // NOLINT(google-explicit-constructor)
  Value(Sequence value) : value_(std::move(value)) {}                    // NOLINT(google-explicit-constructor)
  Value(Dict value) : value_(std::move(value)) {}                        // NOLINT(google-explicit-constructor)
  template <class T>
  requires std::derived_from<T, Object> Value(std::shared_ptr<T> value)
      : value_(std::shared_ptr<Object>(std::move(value))) {}  // NOLINT(google-explicit-constructor)
  Value(Undefined value) : value_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  static Value list(List items) { return sequence(std::move(items), false); }
  static Value tuple(List items) { return sequence(std::move(items), true); }

  template <class T>
  const T* as() const {
    return std::get_if<T>(&value_);
  }
  const std::string* text() const {
    const auto* const text = as<std::shared_ptr<const std::string>>();
    return text == nullptr ? nullptr : text->get();
  }
  /// The elements of a list or tuple; null for other values.
  const List* items() const {
    const auto* const sequence = as<Sequence>();
    return sequence == nullptr ? nullptr : sequence->items.get();
  }
  Object* object() const {
    const auto* const object = as<std::shared_ptr<Object>>();
    return object == nullptr ? nullptr : object->get();
  }
  bool is_none() const { return as<std::nullptr_t>() != nullptr; }
  bool is_undefined() const { return as<Undefined>() != nullptr; }
  /// A bool, integer or real number.
  bool is_number() const { return value_.index() >= 1 && value_.index() <= 3; }
  bool is_integer() const { return value_.index() == 1 || value_.index() == 2; }
  std::int64_t integer() const;  ///< of a bool or integer
  double real() const;           ///< of any number

  bool is_true() const;
  const char* type() const;  ///< the name of the type in Python, for errors

 private:
  // Throws an Error if lists are nested too deeply: all functions of values are recursive.
  static Value sequence(List items, bool is_tuple);

  Variant value_;
};

/// A member of a dict. Its key is a text, or a whole number written as text.
struct Member {
  std::string first;
  Value second;
  bool is_number = false;

  Value key() const;
};

/// Python's str(). Appends to `out`.
void append_text(const Value& value, std::string& out);
std::string text_of(const Value& value);

struct JsonStyle {
  int indent = -1;  ///< −1: on one line
  std::string item = ", ", key = ": ";
  bool ascii = false, sorted = false, has_signs = false;  ///< has_signs: `item` and `key` were chosen
};
/// Python's json.dumps().
std::string json_of(const Value& value, const JsonStyle& style);

/// Parses JSON, keeping the order of members. Throws an Error that starts with `what`.
Value parse(std::string_view json, const std::string& what);

bool equal(const Value& a, const Value& b);
/// Negative, 0 or positive. Throws an Error if they cannot be ordered.
int compare(const Value& a, const Value& b);

}  // namespace mica::io::detail::jinja
