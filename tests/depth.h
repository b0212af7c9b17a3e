#pragma once

/// The length of a chain of ops that overflows the stack of code that follows it by recursion. AddressSanitizer makes
/// every op longer, and its frames are larger: there it is a test of the chain's memory more than of its depth.
#ifdef MICA_ADDRESS_SANITIZER
inline constexpr int kLongChain = 30'000;
#else
inline constexpr int kLongChain = 1'000'000;
#endif

namespace mica::testing_support {

/// Chooses among the cases of a test that is long with AddressSanitizer, whose loops and references, which are not
/// optimized, take five times as long there: one in `cases`. In other builds, all of them. If `cases` has no factor in
/// common with the number of cases of an inner loop, each of these is met, with others of the outer loop.
class OneIn {
 public:
  explicit OneIn([[maybe_unused]] int cases) {
#ifdef MICA_ADDRESS_SANITIZER
    cases_ = cases;
#endif
  }

  /// Whether the next case is left out.
  bool skips() { return count_++ % cases_ != 0; }

 private:
  int cases_ = 1;
  int count_ = 0;
};

}  // namespace mica::testing_support
