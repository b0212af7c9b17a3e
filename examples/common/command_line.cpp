#include "examples/common/command_line.h"

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <cstdint>
#include <exception>
#include <new>
#include <optional>

#include "examples/common/ranks.h"
#include <mica/distributed/group.h>
#include <mica/train/ranks.h>

namespace {

template <class T>
struct Variable {
  using Value = T;
  static std::string text(const T& variable) { return fmt::format("{}", variable); }
};

template <class T>
struct Variable<std::optional<T>> {
  using Value = T;
  static std::string text(const std::optional<T>& variable) { return variable ? fmt::format("{}", *variable) : ""; }
};

}  // namespace

CommandLine::CommandLine(const std::string& description, const std::string& name)
    : app_(std::make_unique<CLI::App>(description, name)) {
  app_->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

CommandLine::~CommandLine() = default;

CommandLine::Option& CommandLine::Option::in_range(double low, double high, const std::string& expected) {
  const auto check = [=](std::string& given) {
    double value = 0;
    const bool good = CLI::detail::lexical_cast(given, value) && value >= low && value <= high;
    return good ? std::string() : fmt::format("expected {}, got {}", expected, given);
  };
  option_.check(CLI::Validator(check, ""));
  return *this;
}

CommandLine::Option& CommandLine::Option::at_least(double low) {
  return in_range(low, 1 << 30, fmt::format("a number from {}", low));
}

CommandLine::Option& CommandLine::Option::between(double low, double high) {
  return in_range(low, high, fmt::format("a number from {} to {}", low, high));
}

CommandLine::Option& CommandLine::Option::positive() { return in_range(1e-30, 1 << 30, "a number above 0"); }

CommandLine::Option& CommandLine::Option::one_of(const std::vector<std::string>& values) {
  option_.check(CLI::IsMember(values));
  return *this;
}

CommandLine::Option& CommandLine::Option::required() {
  option_.required();
  return *this;
}

CommandLine::Option& CommandLine::Option::show_default() {
  option_.capture_default_str();
  return *this;
}

template <class T>
CommandLine::Option CommandLine::add_option(const std::string& name, T& variable, const std::string& help) {
  using Value = typename Variable<T>::Value;
  const auto set = [&variable](const CLI::results_t& given) {
    Value value{};
    if (!CLI::detail::lexical_cast(given.at(0), value)) {
      return false;
    }
    variable = value;
    return true;
  };
  const auto text = [&variable] { return Variable<T>::text(variable); };
  texts_[name] = text;
  CLI::Option* const option = app_->add_option(name, set, help, false, text);
  option->type_name(CLI::detail::type_name<Value>());
  return Option(*option);
}

template CommandLine::Option CommandLine::add_option(const std::string&, bool&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, int&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, std::int64_t&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, std::uint64_t&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, double&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, std::string&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, std::optional<std::int64_t>&,
                                                     const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, std::optional<double>&, const std::string&);
template CommandLine::Option CommandLine::add_option(const std::string&, std::optional<std::string>&,
                                                     const std::string&);

void CommandLine::add_flag(const std::string& name, bool& variable, const std::string& help) {
  texts_[name] = [&variable] { return Variable<bool>::text(variable); };
  app_->add_flag_function(
      name, [&variable](std::int64_t count) { variable = count > 0; }, help);
}

void CommandLine::footer(const std::string& text) { app_->footer(text); }

bool CommandLine::given(const std::string& name) const { return app_->count(name) > 0; }

std::map<std::string, std::string> CommandLine::values(const std::vector<std::string>& names) const {
  std::map<std::string, std::string> values;
  for (const std::string& name : names) {
    values[name] = texts_.at("--" + name)();
  }
  return values;
}

int CommandLine::run(int argc, char** argv, const std::function<void()>& body) {
  const std::string name = app_->get_name();
  // All ranks have the same command line.
  const auto refuse = [&](const std::string& message) {
    return rank_of_messages == 0 ? print_error(name.c_str(), message, 2) : 2;
  };
  report_mapping_faults(name);
  try {
    join_ranks();
    app_->parse(argc, argv);
    body();
    return 0;
  } catch (const CLI::CallForHelp& help) {
    return app_->exit(help);
  } catch (const CLI::ParseError& error) {
    return refuse(std::string(error.what()) + " (see --help)");
  } catch (const UsageError& error) {
    return refuse(error.what());
  } catch (const mica::train::StoppedByRank0&) {
    return 1;
  } catch (const std::bad_alloc&) {
    (void)print_error(name.c_str(), "out of memory", 1);
    mica::distributed::report_failure("out of memory");
    return 1;
  } catch (const std::exception& error) {
    (void)print_error(name.c_str(), error.what(), 1);
    mica::distributed::report_failure(error.what());
    return 1;
  }
}
