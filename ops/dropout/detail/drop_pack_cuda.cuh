#pragma once

// Dropout as a step of other CUDA kernels.

#include <cstdint>

#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

/// Applies dropout to V consecutive elements of a tensor, the first of which has index `element`, a multiple of V. The
/// key is absolute (core/rng.h).
template <int V>
__device__ void drop_pack(float (&x)[V], std::int64_t element, PhiloxKey key, std::uint32_t threshold, float scale) {
  constexpr int kGroup = detail::kDropoutGroup;
  static_assert(V == kGroup || V == kGroup / 2);
  PhiloxBlock bits = detail::draw_dropout_group(key, static_cast<std::uint64_t>(element) / kGroup);
  if (V < kGroup && element % kGroup != 0) {  // the second half of a group
    bits.word[0] = bits.word[2];
    bits.word[1] = bits.word[3];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    x[j] = detail::is_kept(bits, j, threshold) ? x[j] * scale : 0.0f;
  }
}

}  // namespace mica::kernels
