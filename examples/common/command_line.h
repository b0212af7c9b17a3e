#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <stdexcept>
#include <string>

#include <mica/core/device.h>

/// The command line asks for something that makes no sense.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Runs a program: parses the command line into what `app` is bound to, then calls `body`. Every error ends as one line
/// on stderr, with status 2 if the command line is at fault and 1 otherwise.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& body);

/// Checks of options: numbers from `low`, from `low` to `high`, above 0. All are finite and at most 2^30.
CLI::Validator at_least(double low);
CLI::Validator between(double low, double high);
CLI::Validator positive();

/// "auto" (the first GPU where there is one, else the CPU), "cpu" or "cuda". Throws if there is no such device.
mica::Device device_named(const std::string& name);
