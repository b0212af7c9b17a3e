#pragma once

// Dropout inside of other CUDA kernels.

#include <cstdint>

#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

/// What dropout leaves of the elements from number `element` on, a multiple of V. The key is absolute.
template <int V>
__device__ void drop_pack(float (&x)[V], std::int64_t element, PhiloxKey key, std::uint32_t threshold, float scale) {
  constexpr int kGroup = detail::kDropoutGroup;
  static_assert(V == kGroup || V == kGroup / 2);
  PhiloxBlock bits = detail::draw_dropout_group(key, static_cast<std::uint64_t>(element) / kGroup);
  if (V < kGroup && element % kGroup != 0) {  // the later half
    bits.word[0] = bits.word[2];
    bits.word[1] = bits.word[3];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    x[j] = detail::is_kept(bits, j, threshold) ? x[j] * scale : 0.0f;
  }
}

}  // namespace mica::kernels
