#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <mica/core/check.h>

namespace mica::distributed {

/// The text of the Error that f throws; empty if it throws none.
inline std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// Sets variables of the environment until the end of scope.
class Variables {
 public:
  explicit Variables(std::vector<std::pair<const char*, const char*>> variables) : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) {
      setenv(name, value, 1);
    }
  }
  ~Variables() {
    for (const auto& [name, value] : variables_) {
      unsetenv(name);
    }
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  std::vector<std::pair<const char*, const char*>> variables_;
};

}  // namespace mica::distributed
