#pragma once

// SiLU, x / (1 + e^-x), of float32, for epilogues. There are two versions: a sampled token can depend on the last bit
// of a product, so each kernel keeps the division with which it was measured.

namespace mica::kernels {

/// Divides with correct rounding.
__device__ inline float silu(float x) { return x / (1 + __expf(-x)); }

/// Divides in a few instructions, with an error of up to 2 units in the last place, for a kernel in which other threads
/// wait for the result. The result is 0 for x below about -87.3.
__device__ inline float fast_silu(float x) { return __fdividef(x, 1 + __expf(-x)); }

}  // namespace mica::kernels
