#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <utility>

#include <mica/core/check.h>
#include <mica/io/detail/in_quotes.h>
#include <mica/io/detail/jinja.h>
#include <mica/io/detail/jinja_functions.h>
#include <mica/io/detail/jinja_tree.h>

namespace mica::io::detail::jinja {

namespace {

constexpr int kDeepestCall = 500;                // nested statements, expressions and calls together
constexpr std::int64_t kLongestRange = 100'000;  // as in Jinja's sandbox

/// Variables of a scope. Reading looks at the scopes around it, too.
struct Scope {
  explicit Scope(std::shared_ptr<Scope> around) : parent(std::move(around)) {}

  Value* find(const std::string& name) {
    for (auto& variable : variables) {
      if (variable.first == name) {
        return &variable.second;
      }
    }
    return nullptr;
  }
  void set(const std::string& name, Value value) {
    if (Value* const own = find(name)) {
      *own = std::move(value);
    } else {
      variables.emplace_back(name, std::move(value));
    }
  }

  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string, Value>> variables;
};
using ScopePointer = std::shared_ptr<Scope>;

class Namespace final : public Object {
 public:
  const char* kind() const override { return "namespace"; }
  Value attribute(const std::string& name) const override {
    const auto found =
        std::find_if(members.begin(), members.end(), [&](const auto& each) { return each.first == name; });
    return found == members.end() ? Value(Undefined{name}) : found->second;
  }
  void set(const std::string& name, Value value) {
    const auto found =
        std::find_if(members.begin(), members.end(), [&](const auto& each) { return each.first == name; });
    if (found == members.end()) {
      members.emplace_back(name, std::move(value));
    } else {
      found->second = std::move(value);
    }
  }

  std::vector<std::pair<std::string, Value>> members;
};

/// A macro, or the block of a call statement. Refers to its scope, which refers to it: Program breaks the circle.
class Macro final : public Object {
 public:
  Macro(const Statement& statement, ScopePointer scope) : statement(statement), scope(std::move(scope)) {}
  const char* kind() const override { return "macro"; }
  Value attribute(const std::string& name) const override {
    return name == "name" ? Value(statement.text) : Value(Undefined{name});
  }

  const Statement& statement;
  ScopePointer scope;
};

/// A function such as range, or a method of a value.
class Function final : public Object {
 public:
  Function(std::string own_name, Value own_self) : name(std::move(own_name)), self(std::move(own_self)) {}
  const char* kind() const override { return "function"; }
  Value attribute(const std::string& attribute) const override { return Undefined{attribute}; }

  std::string name;
  Value self;  // None for a function
};

class Loop final : public Object {
 public:
  const char* kind() const override { return "loop"; }
  Value attribute(const std::string& name) const override {
    const auto size = static_cast<std::int64_t>(items.size());
    if (name == "index" || name == "index0") {
      return at + (name == "index" ? 1 : 0);
    }
    if (name == "revindex" || name == "revindex0") {
      return size - at - (name == "revindex" ? 0 : 1);
    }
    if (name == "first" || name == "last") {
      return name == "first" ? at == 0 : at + 1 == size;
    }
    if (name == "length") {
      return size;
    }
    if (name == "depth" || name == "depth0") {
      return depth + (name == "depth" ? 1 : 0);
    }
    if (name == "previtem" || name == "nextitem") {
      const std::int64_t other = at + (name == "nextitem" ? 1 : -1);
      return other >= 0 && other < size ? items[static_cast<std::size_t>(other)] : Value(Undefined{name});
    }
    return Undefined{name};
  }

  List items;
  std::int64_t at = 0, depth = 0;
  List changed;                          // the arguments of the last loop.changed()
  const Statement* statement = nullptr;  // of a recursive loop
  ScopePointer scope;
};

constexpr std::array<const char*, 6> kFunctions{"range",           "namespace",    "dict",
                                                "raise_exception", "strftime_now", "joiner"};

enum class Flow { next, stop, skip };

class Program final : public Machine {
 public:
  using Machine::Machine;
  ~Program() override {
    // In any order: nothing is freed recursively while these lists refer to everything.
    for (const ScopePointer& scope : captured_) {
      scope->variables.clear();
    }
    for (const auto& space : namespaces_) {
      space->members.clear();
    }
  }

  std::string run(const Body& body, const Dict& variables) {
    const auto globals = std::make_shared<Scope>(nullptr);
    for (const Member& variable : variables.members()) {
      globals->set(variable.first, variable.second);
    }
    std::string out;
    run(body, std::make_shared<Scope>(globals), out);
    return out;
  }

 private:
  class Level {
   public:
    explicit Level(Program& program) : program_(program) {
      if (++program_.depth_ > kDeepestCall) {
        --program_.depth_;
        program_.refuse("it is nested too deeply");
      }
    }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    ~Level() { --program_.depth_; }

   private:
    Program& program_;
  };

  // Statements.
  void append(std::string_view text, std::string& out) {
    charge(text.size());
    if (out.size() + text.size() > limits().bytes) {
      refuse(fmt::format("the text has more than {} bytes", limits().bytes));
    }
    out += text;
  }
  Flow run(const Body& body, const ScopePointer& scope, std::string& out) {
    for (const Statement& statement : body.statements) {
      line = statement.line;
      charge();
      if (const Flow flow = run(statement, scope, out); flow != Flow::next) {
        return flow;
      }
    }
    return Flow::next;
  }
  std::string text_of_body(const Body& body, const ScopePointer& scope) {
    std::string out;
    run(body, scope, out);
    return out;
  }
  Flow run(const Statement& own, const ScopePointer& scope, std::string& out) {
    const Level level(*this);
    using Kind = Statement::Kind;
    switch (own.kind) {
      case Kind::text: append(own.text, out); break;
      case Kind::output: {
        const Value value = evaluate(*own.value, scope);
        append(value.text() != nullptr ? *value.text() : text_of(value), out);
        break;
      }
      case Kind::condition:
        for (std::size_t i = 0; i < own.bodies.size(); ++i) {
          if (i >= own.conditions.size() || evaluate(*own.conditions[i], scope).is_true()) {
            return run(own.bodies[i], scope, out);
          }
        }
        break;
      case Kind::loop: loop(own, items_of(evaluate(*own.value, scope)), scope, 0, out); break;
      case Kind::set: assign(own.targets, own.unpacks, evaluate(*own.value, scope), scope); break;
      case Kind::set_block: {
        Value text = text_of_body(own.bodies[0], std::make_shared<Scope>(scope));
        assign(own.targets, false,
               own.value != nullptr ? filtered(*own.value, std::move(text), scope) : std::move(text), scope);
        break;
      }
      case Kind::macro: scope->set(own.text, std::make_shared<Macro>(own, captured(scope))); break;
      case Kind::call_block: {
        const Value value = evaluate(*own.value, scope, std::make_shared<Macro>(own, captured(scope)));
        append(text_of(value), out);
        break;
      }
      case Kind::filter:
        append(text_of(filtered(*own.value, text_of_body(own.bodies[0], std::make_shared<Scope>(scope)), scope)), out);
        break;
      case Kind::with: {
        const auto inner = std::make_shared<Scope>(scope);
        for (const Parameter& parameter : own.parameters) {
          inner->set(parameter.name, evaluate(*parameter.otherwise, scope));
        }
        return run(own.bodies[0], inner, out);
      }
      case Kind::scope: return run(own.bodies[0], std::make_shared<Scope>(scope), out);
      case Kind::stop: return Flow::stop;
      case Kind::skip: return Flow::skip;
    }
    return Flow::next;
  }
  ScopePointer captured(const ScopePointer& scope) {
    if (captured_.empty() || captured_.back() != scope) {
      captured_.push_back(scope);
    }
    return scope;
  }

  void assign(const std::vector<std::string>& targets, bool unpacks, const Value& value, const ScopePointer& scope) {
    if (!unpacks) {
      assign(targets[0], value, scope);
      return;
    }
    const List items = items_of(value);
    if (items.size() != targets.size()) {
      refuse(fmt::format("expected {} values, got {}", targets.size(), items.size()));
    }
    for (std::size_t i = 0; i < targets.size(); ++i) {
      assign(targets[i], items[i], scope);
    }
  }
  void assign(const std::string& target, const Value& value, const ScopePointer& scope) {
    const std::size_t dot = target.find('.');
    if (dot == std::string::npos) {
      scope->set(target, value);
      return;
    }
    const Value object = lookup(target.substr(0, dot), scope);
    auto* const space = dynamic_cast<Namespace*>(object.object());
    if (space == nullptr) {
      refuse(fmt::format("cannot set {}: {} is not a namespace", in_quotes(target), object.type()));
    }
    charge(space->members.size());
    space->set(target.substr(dot + 1), value);
  }

  void loop(const Statement& own, List items, const ScopePointer& scope, std::int64_t depth, std::string& out) {
    if (!own.conditions.empty()) {
      List kept;
      for (Value& item : items) {
        const auto inner = std::make_shared<Scope>(scope);
        assign(own.targets, own.unpacks, item, inner);
        if (evaluate(*own.conditions[0], inner).is_true()) {
          kept.push_back(std::move(item));
        }
      }
      items = std::move(kept);
    }
    const auto state = std::make_shared<Loop>();
    state->items = std::move(items);
    state->depth = depth;
    state->statement = own.is_recursive ? &own : nullptr;
    state->scope = scope;
    const std::size_t count = state->items.size();
    for (std::size_t i = 0; i < count; ++i) {
      charge();
      const auto inner = std::make_shared<Scope>(scope);
      state->at = static_cast<std::int64_t>(i);
      inner->set("loop", Value(state));
      assign(own.targets, own.unpacks, state->items[i], inner);
      if (run(own.bodies[0], inner, out) == Flow::stop) {
        break;
      }
    }
    state->scope = nullptr;
    if (count == 0 && own.bodies.size() > 1) {
      run(own.bodies[1], std::make_shared<Scope>(scope), out);
    }
  }

  // Expressions.
  Value lookup(const std::string& name, const ScopePointer& scope) {
    for (Scope* each = scope.get(); each != nullptr; each = each->parent.get()) {
      charge(each->variables.size());
      if (Value* const value = each->find(name)) {
        return *value;
      }
    }
    const bool is_function = std::find(kFunctions.begin(), kFunctions.end(), name) != kFunctions.end();
    return is_function ? Value(std::make_shared<Function>(name, nullptr)) : Value(Undefined{name});
  }
  Arguments arguments_of(const Expression& own, std::size_t first, const ScopePointer& scope) {
    Arguments arguments;
    for (std::size_t i = first; i < own.arguments.size(); ++i) {
      arguments.values.push_back(evaluate(*own.arguments[i], scope));
    }
    for (const auto& [name, value] : own.named) {
      arguments.named.emplace_back(name, evaluate(*value, scope));
    }
    return arguments;
  }
  // The filters of a block, around its text.
  Value filtered(const Expression& own, Value text, const ScopePointer& scope) {
    const Value inner =
        own.arguments[0] == nullptr ? std::move(text) : filtered(*own.arguments[0], std::move(text), scope);
    return call_filter(own.name, inner, arguments_of(own, 1, scope));
  }
  Value evaluate(const Expression& own, const ScopePointer& scope, std::shared_ptr<Macro> caller = nullptr) {
    const Level level(*this);
    using Kind = Expression::Kind;
    line = own.line;
    charge();
    const auto argument = [&](std::size_t i) { return evaluate(*own.arguments[i], scope); };
    switch (own.kind) {
      case Kind::constant: return own.constant;
      case Kind::name: return lookup(own.name, scope);
      case Kind::list:
      case Kind::tuple: {
        List items;
        for (std::size_t i = 0; i < own.arguments.size(); ++i) {
          items.push_back(argument(i));
        }
        return own.kind == Kind::list ? Value::list(std::move(items)) : Value::tuple(std::move(items));
      }
      case Kind::dict: {
        Dict::Members members;
        for (std::size_t i = 0; i + 1 < own.arguments.size(); i += 2) {
          const Value key = argument(i);
          if (key.text() == nullptr && !key.is_integer()) {
            refuse(fmt::format("the key of a dict is of type {}, which is not supported", key.type()));
          }
          members.push_back(
              {key.text() != nullptr ? *key.text() : std::to_string(key.integer()), argument(i + 1), key.is_integer()});
        }
        return Dict(std::move(members));
      }
      case Kind::attribute: {
        const Value object = argument(0);
        if (object.as<Dict>() != nullptr && is_dict_method(own.name)) {
          return std::make_shared<Function>(own.name, object);
        }
        return member(object, Value(own.name));
      }
      case Kind::item: {
        const Value object = argument(0), key = argument(1);
        charge(object.text() != nullptr ? object.text()->size() : 0);
        return member(object, key);
      }
      case Kind::slice: {
        const auto part = [&](std::size_t i) { return own.arguments[i] == nullptr ? Value() : argument(i); };
        return sliced(*this, argument(0), part(1), part(2), part(3));
      }
      case Kind::call: return call(own, scope, std::move(caller));
      case Kind::filter: {
        if (own.name == "default" || own.name == "d") {
          return call_filter(own.name, argument(0), arguments_of(own, 1, scope));
        }
        const Value value = argument(0);
        return call_filter(own.name, value, arguments_of(own, 1, scope));
      }
      case Kind::test: {
        const Value value = argument(0);
        return call_test(own.name, value, arguments_of(own, 1, scope));
      }
      case Kind::unary: {
        const Value value = argument(0);
        if (own.name == "not") {
          return !value.is_true();
        }
        return own.name == "-"
                   ? binary("-", value.as<double>() != nullptr ? Value(-0.0) : Value(std::int64_t{0}), value)
                   : binary("+", value, Value(std::int64_t{0}));
      }
      case Kind::binary: {
        const Value left = argument(0);
        return binary(own.name, left, argument(1));
      }
      case Kind::join: {
        std::string text;
        for (std::size_t i = 0; i < own.arguments.size(); ++i) {
          append(text_of(argument(i)), text);
        }
        return text;
      }
      case Kind::compare: return compared(own, scope);
      case Kind::logical_and: {
        Value left = argument(0);
        return left.is_true() ? argument(1) : left;
      }
      case Kind::logical_or: {
        Value left = argument(0);
        return left.is_true() ? left : argument(1);
      }
      case Kind::condition:
        return argument(1).is_true()         ? argument(0)
               : own.arguments[2] != nullptr ? argument(2)
                                             : Value(Undefined{"the inline if-expression without else"});
    }
    return {};
  }
  Value compared(const Expression& own, const ScopePointer& scope) {
    Value left = evaluate(*own.arguments[0], scope);
    for (std::size_t i = 0; i < own.operators.size(); ++i) {
      Value right = evaluate(*own.arguments[i + 1], scope);
      const std::string& sign = own.operators[i];
      charge(left.text() != nullptr ? left.text()->size() : 0);
      const bool holds = sign == "in"       ? contains(right, left)
                         : sign == "not in" ? !contains(right, left)
                         : sign == "=="     ? equal(left, right)
                         : sign == "!="     ? !equal(left, right)
                                            : ordered(sign, left, right);
      if (!holds) {
        return false;
      }
      left = std::move(right);
    }
    return true;
  }
  bool ordered(const std::string& sign, const Value& left, const Value& right) const {
    for (const Value* const value : {&left, &right}) {
      if (const auto* const undefined = value->as<Undefined>()) {
        refuse(fmt::format("{} is undefined", in_quotes(undefined->name)));
      }
    }
    const int order = jinja::compare(left, right);
    return sign == "<" ? order < 0 : sign == "<=" ? order <= 0 : sign == ">" ? order > 0 : order >= 0;
  }

  Value call(const Expression& own, const ScopePointer& scope, std::shared_ptr<Macro> caller) {
    const Expression& callee = *own.arguments[0];
    if (callee.kind == Expression::Kind::attribute) {
      const Value object = evaluate(*callee.arguments[0], scope);
      const bool has_methods = object.text() != nullptr || object.items() != nullptr ||
                               (object.as<Dict>() != nullptr && is_dict_method(callee.name));
      if (has_methods) {
        const Arguments arguments = arguments_of(own, 1, scope);
        line = own.line;
        return call_method(object, callee.name, arguments);
      }
      if (auto* const state = dynamic_cast<Loop*>(object.object())) {
        return call_loop(*state, callee.name, arguments_of(own, 1, scope));
      }
      return call(member(object, Value(callee.name)), arguments_of(own, 1, scope), std::move(caller));
    }
    const Value function = evaluate(callee, scope);
    return call(function, arguments_of(own, 1, scope), std::move(caller));
  }
  Value call(const Value& function, const Arguments& arguments) override { return call(function, arguments, nullptr); }
  Value call(const Value& function, const Arguments& arguments, std::shared_ptr<Macro> caller) {
    if (const auto* const undefined = function.as<Undefined>()) {
      refuse(fmt::format("{} is undefined", in_quotes(undefined->name)));
    }
    Object* const object = function.object();
    if (auto* const macro = dynamic_cast<Macro*>(object)) {
      return call_macro(*macro, arguments, std::move(caller));
    }
    if (auto* const named = dynamic_cast<Function*>(object)) {
      return named->self.is_none() ? call_function(named->name, arguments)
                                   : call_method(named->self, named->name, arguments);
    }
    if (auto* const state = dynamic_cast<Loop*>(object);
        state != nullptr && state->statement != nullptr && state->scope != nullptr) {
      std::string out;
      loop(*state->statement, items_of(arguments.get(0, "iterable", nullptr)), state->scope, state->depth + 1, out);
      return out;
    }
    refuse(fmt::format("{} cannot be called", function.type()));
  }
  Value call_loop(Loop& state, const std::string& name, const Arguments& arguments) {
    if (name == "cycle" && !arguments.values.empty()) {
      return arguments.values[static_cast<std::size_t>(state.at) % arguments.values.size()];
    }
    if (name == "changed") {
      const bool is_same = state.changed.size() == arguments.values.size() && !state.changed.empty() &&
                           std::equal(state.changed.begin(), state.changed.end(), arguments.values.begin(), equal);
      state.changed = arguments.values;
      return !is_same;
    }
    refuse(fmt::format("loop.{} is not supported", name));
  }
  Value call_macro(const Macro& macro, const Arguments& arguments, std::shared_ptr<Macro> caller) {
    const Statement& own = macro.statement;
    const auto scope = std::make_shared<Scope>(macro.scope);
    if (caller != nullptr) {
      scope->set("caller", std::move(caller));
    }
    const std::size_t count = own.parameters.size();
    Dict::Members others;
    for (const auto& [name, value] : arguments.named) {
      const bool is_known = std::any_of(own.parameters.begin(), own.parameters.end(),
                                        [&, &own_name = name](const Parameter& each) { return each.name == own_name; });
      if (!is_known && name == "caller") {
        scope->set(name, value);
      } else if (!is_known) {
        others.push_back({name, value});
      }
    }
    List rest(arguments.values.begin() + static_cast<std::ptrdiff_t>(std::min(count, arguments.values.size())),
              arguments.values.end());
    scope->set("varargs", Value::tuple(std::move(rest)));
    scope->set("kwargs", Dict(std::move(others)));
    for (std::size_t i = 0; i < count; ++i) {
      const Parameter& parameter = own.parameters[i];
      Value value = Undefined{parameter.name};
      if (const Value* const given = arguments.find(i, parameter.name)) {
        value = *given;
      } else if (parameter.otherwise != nullptr) {
        value = evaluate(*parameter.otherwise, scope);
      }
      scope->set(parameter.name, std::move(value));
    }
    return text_of_body(own.bodies[0], scope);
  }
  Value call_function(const std::string& name, const Arguments& arguments) {
    if (name == "namespace" || name == "dict") {
      Dict::Members members;
      const Value first = arguments.get(0, "", nullptr);
      if (const Dict* const own = first.as<Dict>()) {
        members = own->members();
      }
      for (const auto& [member_name, value] : arguments.named) {
        members.push_back({member_name, value});
      }
      if (name == "dict") {
        return Dict(std::move(members));
      }
      auto space = std::make_shared<Namespace>();
      for (Member& each : members) {
        space->set(each.first, std::move(each.second));
      }
      namespaces_.push_back(space);
      return space;
    }
    if (name == "range") {
      return range(arguments);
    }
    if (name == "raise_exception") {
      fail("chat template: {}", text_of(arguments.get(0, "message", "")));
    }
    if (name == "strftime_now") {
      const std::time_t now = limits().time >= 0 ? static_cast<std::time_t>(limits().time) : std::time(nullptr);
      std::tm parts{};
      localtime_r(&now, &parts);
      const std::string format = text_of(arguments.get(0, "format", ""));
      std::array<char, 1024> text{};
      return std::string(text.data(), std::strftime(text.data(), text.size(), format.c_str(), &parts));
    }
    refuse(fmt::format("the function {} is not supported", name));
  }
  Value range(const Arguments& arguments) {
    std::array<std::int64_t, 3> bounds{0, 0, 1};  // start, stop, step
    const std::size_t count = arguments.values.size();
    for (std::size_t i = 0; i < std::min<std::size_t>(count, 3); ++i) {
      if (!arguments.values[i].is_integer()) {
        refuse(fmt::format("range expects whole numbers, got {}", arguments.values[i].type()));
      }
      bounds[count == 1 ? 1 : i] = arguments.values[i].integer();
    }
    const auto [start, stop, step] = bounds;
    if (step == 0 || count == 0 || count > 3) {
      refuse("range expects one to three numbers, and a step other than 0");
    }
    const double size = (static_cast<double>(stop) - static_cast<double>(start)) / static_cast<double>(step);
    if (size > static_cast<double>(kLongestRange)) {
      refuse(fmt::format("a range of more than {} numbers", kLongestRange));
    }
    List items;
    for (std::int64_t at = start; step > 0 ? at < stop : at > stop;) {
      items.emplace_back(at);
      if (__builtin_add_overflow(at, step, &at)) {
        break;
      }
    }
    charge(items.size() * sizeof(Value));
    return Value::list(std::move(items));
  }

  int depth_ = 0;
  std::vector<ScopePointer> captured_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
};

}  // namespace

Template::Template(std::string_view source) : body_(std::make_shared<const Body>(parse_template(source))) {}

std::string Template::render(const Dict& variables, const Limits& limits) const {
  return Program(limits).run(*body_, variables);
}

}  // namespace mica::io::detail::jinja
