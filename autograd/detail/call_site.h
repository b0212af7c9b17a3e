#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mica::autograd {

/// A call stack. Stores return addresses only; symbols are resolved on demand.
class CallSite {
 public:
  /// The stack of the caller.
  static CallSite here();

  /// The user's functions, innermost first, at most `most`. Frames of mica, of the standard library and above main are
  /// omitted. A frame is "function at file:line" if the program has debug information and mica was built with
  /// libbacktrace (which comes with g++); else the function name; else the program and an offset for addr2line. Frames
  /// of this last kind may be mica's own, so up to twice as many are listed.
  std::vector<std::string> user_functions(std::size_t most = 6) const;

 private:
  std::vector<void*> addresses_;  // innermost first
};

}  // namespace mica::autograd
