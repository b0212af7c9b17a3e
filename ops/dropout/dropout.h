#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Dropout: y = x · m / (1 − p), where each element's m is 0 with probability p and 1 otherwise (Srivastava et al.,
/// JMLR 15, 2014, but scaled during training instead of afterwards). Returns x itself if `training` is false or p is 0.
///
/// @param x  floating, any shape.
/// @param p  in [0, 1), rounded to a multiple of 2⁻¹⁶, of at least 2⁻¹⁶ unless it is 0.
/// @return of x's shape and dtype, row-major. Differentiable any number of times.
///
/// Whether element i in row-major order is dropped is a function of the generator's (seed, offset) and i, the same on
/// every device (see core/rng.h). Backward computes m again, so that it need not be stored. Throws Error if x is not
/// floating or p is out of range.
Tensor dropout(const Tensor& x, double p, bool training = true);

}  // namespace mica
