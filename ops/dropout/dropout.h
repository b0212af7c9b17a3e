#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// y = x · m / (1 - p), where each m is 0 with probability p and 1 otherwise (Srivastava et al., JMLR 15, 2014; scaled
/// during training). Returns x itself if not training or if p is 0; any other p is rounded to a multiple of 2⁻¹⁶, of at
/// least one.
///
/// Any shape, for float64, float32, float16 and bfloat16; p in [0, 1). Whether element i in row-major order is dropped
/// is a function of (seed, offset, i), see core/rng.h: the same on every device, and computed again in backward instead
/// of stored.
Tensor dropout(const Tensor& x, double p, bool training = true);

}  // namespace mica
