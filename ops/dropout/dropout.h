#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// y = x · m / (1 - p), where each m is 0 with probability p and else 1 (Srivastava and others, JMLR 15, 2014, with the
/// scaling done while training). x itself if not training or if p is 0.
///
/// Any shape, for float64, float32, float16 and bfloat16; p in [0, 1). Element i in row-major order is dropped by the
/// random number (seed, offset, i) of core/rng.h: the same on every device, and drawn again in backward instead of
/// stored.
Tensor dropout(const Tensor& x, double p, bool training = true);

}  // namespace mica
