#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mica::autograd {

/// From where something was called. Keeps return addresses only; what they mean is looked up when it is asked for.
class CallSite {
 public:
  /// Here, as seen by the caller.
  static CallSite here();

  /// The user's functions, innermost first, at most `most`: those of mica and of the standard library are left out, and
  /// so is what comes before main. Each is "function at file:line" where there is debug information and libbacktrace
  /// (which comes with g++) was found at build time; else the function or, where nobody knows its name, the program
  /// with an offset for addr2line. Of the latter there are up to twice as many, as some may be mica's.
  std::vector<std::string> user_functions(std::size_t most = 6) const;

 private:
  std::vector<void*> addresses_;  // innermost first
};

}  // namespace mica::autograd
