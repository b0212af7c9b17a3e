#include "examples/common/command_line.h"

#include <fmt/core.h>

#include <cstdio>
#include <exception>
#include <new>

#include <mica/core/check.h>

namespace {

int complain(const CLI::App& app, std::string message, int status) {
  for (char& c : message) {
    if (c == '\n') {
      c = ' ';
    }
  }
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", app.get_name().c_str(), message.c_str());
  return status;
}

constexpr double largest = 1 << 30;

CLI::Validator number(double low, double high, const std::string& expected) {
  return CLI::Validator(
      [=](std::string& given) {
        double value = 0;
        const bool good = CLI::detail::lexical_cast(given, value) && value >= low && value <= high;
        return good ? std::string() : fmt::format("expected {}, got {}", expected, given);
      },
      "");
}

}  // namespace

CLI::Validator at_least(double low) { return number(low, largest, fmt::format("a number from {}", low)); }

CLI::Validator between(double low, double high) {
  return number(low, high, fmt::format("a number from {} to {}", low, high));
}

CLI::Validator positive() { return number(1e-30, largest, "a number above 0"); }

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& body) {
  try {
    app.parse(argc, argv);
    body();
    return 0;
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return complain(app, std::string(error.what()) + " (see --help)", 2);
  } catch (const UsageError& error) {
    return complain(app, error.what(), 2);
  } catch (const std::bad_alloc&) {
    return complain(app, "there is too little memory", 1);
  } catch (const std::exception& error) {
    return complain(app, error.what(), 1);
  }
}

mica::Device device_named(const std::string& name) {
  if (name == "cpu" || (name == "auto" && !mica::cuda_available())) {
    return mica::Device::cpu();
  }
  mica::check(mica::cuda_available(), "there is no CUDA device to use{}",
              MICA_WITH_CUDA ? "" : "; this program was built without CUDA");
  return mica::Device::cuda();
}
