#pragma once

/// The length of a chain of ops that overflows the stack of code that follows it by recursion. AddressSanitizer's
/// frames are larger, so a tenth is enough, and every op takes longer.
#ifdef MICA_ADDRESS_SANITIZER
inline constexpr int kLongChain = 100'000;
#else
inline constexpr int kLongChain = 1'000'000;
#endif
