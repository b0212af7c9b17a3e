#pragma once

#include <cstdlib>
#include <string>

namespace mica::testing_support {

/// The value of the environment variable `name` or, if it is not set, `built`, a path that was compiled in. The
/// variable is for build trees that were moved to another machine.
inline std::string folder_from(const char* name, const char* built) {
  const char* moved = std::getenv(name);
  return moved != nullptr ? moved : built;
}

}  // namespace mica::testing_support
