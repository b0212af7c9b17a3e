#pragma once

#include <cstdlib>
#include <string>

namespace mica::testing_support {

/// The folder `built`, a path compiled in by the build, or the value of the environment variable `name` if set, for a
/// build tree that was moved to another machine.
inline std::string folder_from(const char* name, const char* built) {
  const char* moved = std::getenv(name);
  return moved != nullptr ? moved : built;
}

}  // namespace mica::testing_support
