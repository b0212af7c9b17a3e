#pragma once

// The rounds of Philox4x32 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), for
// host and device. core/philox.h defines a tensor's random numbers.

#include <cstdint>

#include <mica/core/half.h>
#include <mica/core/rng.h>

namespace mica {

struct PhiloxBlock {
  std::uint32_t word[4];
};

#if defined(__CUDACC__)
/// The key with its seed and its whole offset, for kernels that read them.
__device__ inline PhiloxKey absolute_key(PhiloxKey key) {
  if (key.start != nullptr) {
    const auto start = __ldg(reinterpret_cast<const ulonglong2*>(key.start));
    return {.seed = start.x, .offset = start.y + key.offset};
  }
  return key;
}
#endif

/// 128 bits as a function of an absolute key and a subsequence, with cuRAND's meaning of both. Ten rounds are cuRAND's
/// function; seven are the fewest that pass BigCrush (table 2 of the paper).
template <int kRounds>
MICA_HOST_DEVICE inline PhiloxBlock philox_rounds(PhiloxKey key, std::uint64_t subsequence) {
  const std::uint64_t position = key.offset / 4;
  std::uint32_t c[4] = {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32),
                        static_cast<std::uint32_t>(subsequence), static_cast<std::uint32_t>(subsequence >> 32)};
  std::uint32_t k[2] = {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32)};
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53} * c[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57} * c[2];
    const std::uint32_t next[4] = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<std::uint32_t>(p1),
                                   static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<std::uint32_t>(p0)};
    for (int i = 0; i < 4; ++i) {
      c[i] = next[i];
    }
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

}  // namespace mica
