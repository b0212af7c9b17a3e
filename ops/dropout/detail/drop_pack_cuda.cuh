#pragma once

// Dropout as a step of other CUDA kernels.

#include <cstdint>

#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

/// Which of V consecutive elements of a tensor dropout keeps: bit j for element number j of them. The first has index
/// `element`, a multiple of V. The key is absolute (core/rng.h).
template <int V>
__device__ unsigned kept_of_pack(std::int64_t element, PhiloxKey key, std::uint32_t threshold) {
  constexpr int kGroup = detail::kDropoutGroup;
  static_assert(V == kGroup || V == kGroup / 2);
  PhiloxBlock bits = detail::draw_dropout_group(key, static_cast<std::uint64_t>(element) / kGroup);
  if (V < kGroup && element % kGroup != 0) {  // the second half of a group
    bits.word[0] = bits.word[2];
    bits.word[1] = bits.word[3];
  }
  unsigned kept = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    kept |= detail::is_kept(bits, j, threshold) ? 1u << j : 0u;
  }
  return kept;
}

/// Drops those of V elements whose bit is not set, and scales the others.
template <int V>
__device__ void keep_of_pack(float (&x)[V], unsigned kept, float scale) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    x[j] = (kept >> j & 1) != 0 ? x[j] * scale : 0.0f;
  }
}

/// Applies dropout to V consecutive elements, the first of which has index `element`.
template <int V>
__device__ void drop_pack(float (&x)[V], std::int64_t element, PhiloxKey key, std::uint32_t threshold, float scale) {
  keep_of_pack(x, kept_of_pack<V>(element, key, threshold), scale);
}

}  // namespace mica::kernels
