#pragma once

// The command lines of the examples. CLI11 takes seconds to compile, so only the file that declares a program's options
// includes this.

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "examples/common/program.h"

/// Validators of options: numbers from `low` to `high`, from `low`, above 0. NaN is rejected.
inline CLI::Validator number(double low, double high, const std::string& expected) {
  return CLI::Validator(
      [=](std::string& given) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(given, value) && value >= low && value <= high;
        return good ? std::string() : fmt::format("expected {}, got {}", expected, given);
      },
      "");
}
inline CLI::Validator between(double low, double high) {
  return number(low, high, fmt::format("a number from {} to {}", low, high));
}
inline CLI::Validator at_least(double low) { return number(low, 1 << 30, fmt::format("a number from {}", low)); }
inline CLI::Validator positive() { return number(1e-30, 1 << 30, "a number above 0"); }

/// Runs a program: parses the command line into the variables bound to `app`, then calls `body`. Every error is one
/// line on stderr, with status 2 for a bad command line and 1 otherwise.
template <class Body>
int run_program(CLI::App& app, int argc, char** argv, const Body& body) {
  const char* const name = app.get_name().c_str();
  try {
    app.parse(argc, argv);
    body();
    return 0;
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return print_error(name, std::string(error.what()) + " (see --help)", 2);
  } catch (const UsageError& error) {
    return print_error(name, error.what(), 2);
  } catch (const std::bad_alloc&) {
    return print_error(name, "out of memory", 1);
  } catch (const std::exception& error) {
    return print_error(name, error.what(), 1);
  }
}
