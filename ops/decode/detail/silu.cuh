#pragma once

// SiLU, x / (1 + e^-x), in epilogues of float32. There are two: a sampled token can depend on the last bit of a
// product, so that each kernel keeps the division it has been measured with.

namespace mica::kernels {

/// By a division that is rounded correctly.
__device__ inline float silu(float x) { return x / (1 + __expf(-x)); }

/// By a division of a few instructions, off by up to 2 units in the last place, where others wait for the result. From
/// about x = -87.3 down it is 0.
__device__ inline float fast_silu(float x) { return __fdividef(x, 1 + __expf(-x)); }

}  // namespace mica::kernels
