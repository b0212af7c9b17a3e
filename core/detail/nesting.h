#pragma once

#include <utility>

namespace mica::detail {

/// Calls std::terminate with an Error in flight, since the destructors that detect this cannot throw.
[[noreturn]] void ended_out_of_order(const char* guard) noexcept;

/// A member of guards that restore, when they end, the state that they found. This is right only for the innermost
/// guard of its kind on its thread. If another one ends first, or ends on another thread, the program ends with an
/// error that names the guard. Guards that change the same state share a Kind.
template <class Kind>
class Nested {
 public:
  explicit Nested(const char* guard) : guard_(guard), outer_(std::exchange(innermost_, this)) {}
  ~Nested() {
    if (!is_innermost()) [[unlikely]] {
      ended_out_of_order(guard_);
    }
    innermost_ = outer_;
  }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;

  /// Whether this thread may end the guard now.
  bool is_innermost() const { return innermost_ == this; }

 private:
  static inline thread_local constinit Nested* innermost_ = nullptr;
  const char* guard_;
  Nested* outer_;
};

}  // namespace mica::detail
