#pragma once

// Parsed templates.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <mica/io/detail/jinja_value.h>

namespace mica::io::detail::jinja {

struct Expression {
  enum class Kind {
    constant,   ///< constant
    name,       ///< name
    list,       ///< arguments
    tuple,      ///< arguments
    dict,       ///< arguments: key, value, key, value …
    attribute,  ///< arguments[0].name
    item,       ///< arguments[0][arguments[1]]
    slice,      ///< arguments[0][from:to:step]; null for those that are absent
    call,       ///< arguments[0](arguments[1] …, named)
    filter,     ///< arguments[0] | name(arguments[1] …, named); without arguments[0] in a filter block
    test,       ///< arguments[0] is name(arguments[1] …, named)
    unary,      ///< name: not, -, +
    binary,     ///< name: + - * / // % **
    join,       ///< arguments with ~ between them
    compare,    ///< a chain: arguments with operators between them
    logical_and,
    logical_or,
    condition  ///< arguments[0] if arguments[1] else arguments[2], which may be null
  };
  using Pointer = std::unique_ptr<Expression>;

  Kind kind = Kind::constant;
  int line = 0, height = 1;
  std::string name{};
  Value constant{};
  std::vector<Pointer> arguments{};
  std::vector<std::pair<std::string, Pointer>> named{};
  std::vector<std::string> operators{};
};

struct Statement;
struct Body {
  std::vector<Statement> statements;
};

struct Parameter {
  std::string name;
  Expression::Pointer otherwise;
};

struct Statement {
  enum class Kind {
    text,        ///< text
    output,      ///< value
    condition,   ///< bodies[i] if conditions[i]; the last body may have no condition
    loop,        ///< targets in value, if conditions[0]; bodies[0], else bodies[1]
    set,         ///< targets = value
    set_block,   ///< targets[0] = bodies[0], filtered by value if there is one
    macro,       ///< text(parameters): bodies[0]
    call_block,  ///< value, with caller(parameters): bodies[0]
    filter,      ///< bodies[0], filtered by value
    with,        ///< parameters, bodies[0]
    scope,       ///< bodies[0], in a scope of its own
    stop,        ///< break
    skip         ///< continue
  };
  Kind kind = Kind::text;
  int line = 0;
  std::string text{};
  Expression::Pointer value{};
  std::vector<std::string> targets{};  ///< names; "ns.name" for an attribute
  bool is_recursive = false, unpacks = false;
  std::vector<Expression::Pointer> conditions{};
  std::vector<Parameter> parameters{};
  std::vector<Body> bodies{};
};

/// Throws an Error that names the line.
Body parse_template(std::string_view source);

}  // namespace mica::io::detail::jinja
