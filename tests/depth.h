#pragma once

/// The length of a chain of ops that overflows the stack of code that follows it by recursion. With
/// AddressSanitizer every op is slower, so the chain is shorter; other builds are the ones that test its depth.
#ifdef MICA_ADDRESS_SANITIZER
inline constexpr int kLongChain = 30'000;
#else
inline constexpr int kLongChain = 1'000'000;
#endif

namespace mica::testing_support {

/// With AddressSanitizer, chooses one in `cases` of a test's cases, since long tests take five times as long there. In
/// other builds it chooses all. `cases` should have no factor in common with the number of cases of an inner loop: then
/// each of these comes up.
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
