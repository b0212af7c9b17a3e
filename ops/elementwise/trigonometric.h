#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Trigonometric and hyperbolic functions and their inverses, as in unary.h, which has sin, cos and tanh. Angles are in
// radians. The gradient is computed in float32 for 16-bit floats.

Tensor tan(const Tensor& x);
/// The inverse functions are NaN outside of their domains: asin and acos of |x| > 1, acosh of x < 1, atanh of |x| > 1.
Tensor asin(const Tensor& x);
Tensor acos(const Tensor& x);
Tensor atan(const Tensor& x);
Tensor sinh(const Tensor& x);
Tensor cosh(const Tensor& x);
Tensor asinh(const Tensor& x);
Tensor acosh(const Tensor& x);
Tensor atanh(const Tensor& x);

/// The angle of the point (x, y), from −π to π: the arctangent of y / x in the right quadrant. The shapes broadcast.
/// The gradient is NaN at the origin.
Tensor atan2(const Tensor& y, const Tensor& x);

}  // namespace mica
