#pragma once

// What the CUDA kernels of add_layer_norm share.

#include <cstdint>

#include <mica/core/philox.h>

namespace mica::kernels::add_layer_norm_cuda {

/// What dropout leaves of the elements from number `element` on, which is a multiple of 4.
template <int V>
__device__ void drop(float (&x)[V], std::int64_t element, PhiloxKey key, std::uint32_t threshold, float scale) {
  static_assert(V % 4 == 0);
#pragma unroll
  for (int j = 0; j < V; j += 4) {
    const PhiloxBlock block = philox_block(key, static_cast<std::uint64_t>(element + j) / 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[j + k] = block.word[k] >= threshold ? x[j + k] * scale : 0.0f;
    }
  }
}

}  // namespace mica::kernels::add_layer_norm_cuda
