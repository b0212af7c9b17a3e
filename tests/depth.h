#pragma once

/// How many ops in a chain overflow a stack of 8 MiB if code follows the chain by recursion, with frames of 42 bytes or
/// more per op. With AddressSanitizer every op is slower, so the chain is too short for that; other builds test it.
#ifdef MICA_ADDRESS_SANITIZER
inline constexpr int kLongChain = 30'000;
#else
inline constexpr int kLongChain = 200'000;
#endif

namespace mica::testing_support {

/// With AddressSanitizer, where tests take five times as long, chooses every `cases`-th case of a test. In other
/// builds, chooses all. `cases` should have no factor in common with the number of cases of an inner loop, so that each
/// of these gets its turn.
class OneIn {
 public:
  explicit OneIn([[maybe_unused]] int cases) {
#ifdef MICA_ADDRESS_SANITIZER
    cases_ = cases;
#endif
  }

  /// Whether to skip the next case.
  bool skips() { return count_++ % cases_ != 0; }

 private:
  int cases_ = 1;
  int count_ = 0;
};

}  // namespace mica::testing_support
