#pragma once

#include <mica/core/tensor.h>

namespace mica {

// As in unary.h, which has floor, ceil and round.

/// −1, 0 or 1, by the sign of x; 0 for NaN. All dtypes except bool. The derivative is 0.
Tensor sign(const Tensor& x);
/// x rounded towards 0. The derivative is 0.
Tensor trunc(const Tensor& x);
/// x − trunc(x), with the sign of x; NaN for infinities. The derivative is 1.
Tensor frac(const Tensor& x);

}  // namespace mica
