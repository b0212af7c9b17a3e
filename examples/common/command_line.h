#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "examples/common/program.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

/// A program's command line. A wrapper of CLI11, which takes seconds to compile: only command_line.cpp includes it.
class CommandLine {
 public:
  /// `name`: the program's name.
  CommandLine(const std::string& description, const std::string& name);
  ~CommandLine();

  /// Constraints on an option's value. NaN is not in any range.
  class Option {
   public:
    Option& at_least(double low);
    Option& between(double low, double high);
    Option& positive();
    Option& one_of(const std::vector<std::string>& values);
    Option& required();
    /// Shows the variable's current value in --help as the default.
    Option& show_default();

   private:
    friend class CommandLine;
    explicit Option(CLI::Option& option) : option_(option) {}
    Option& in_range(double low, double high, const std::string& expected);

    CLI::Option& option_;
  };

  /// Parsing writes the option's value, the last one if it is given several times, to `variable`. T is bool, int,
  /// std::int64_t, std::uint64_t, double, std::string, or std::optional of std::int64_t, double or std::string.
  template <class T>
  Option add_option(const std::string& name, T& variable, const std::string& help = "");
  /// An option without a value, which sets `variable`.
  void add_flag(const std::string& name, bool& variable, const std::string& help);
  /// Text below the options in --help.
  void footer(const std::string& text);

  /// After parsing: whether the option was given.
  bool given(const std::string& name) const;
  /// The current values of the variables of options and flags, as text: of "lr" that of --lr.
  std::map<std::string, std::string> values(const std::vector<std::string>& names) const;

  /// Runs the program: joins the ranks, parses the command line, then calls `body`. Returns the exit status. Every
  /// error is one line on stderr, with status 2 for a bad command line and 1 otherwise.
  int run(int argc, char** argv, const std::function<void()>& body);

 private:
  std::unique_ptr<CLI::App> app_;
  std::map<std::string, std::function<std::string()>> texts_;  // of the variables
};
