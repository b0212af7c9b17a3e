#pragma once

#include <cstdlib>
#include <string>

namespace mica::testing_support {

/// A folder whose path the build has compiled in as `built`, or the environment variable `name` where that is set: for
/// a build tree that was moved to another machine.
inline std::string folder_from(const char* name, const char* built) {
  const char* moved = std::getenv(name);
  return moved != nullptr ? moved : built;
}

}  // namespace mica::testing_support
