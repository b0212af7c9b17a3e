#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Element-wise ops on two tensors of the same dtype and device, whose shapes broadcast (NumPy's rules), or on a tensor
// and a number. There is no type promotion: different dtypes or devices throw. A number combined with an integer tensor
// must be an integer that the tensor's dtype can represent; combined with a 16-bit float, it is rounded to float32. All
// are differentiable unless stated otherwise; gradients are summed over broadcast axes.

/// a + b, a − b and a · b, for all dtypes except bool. Integers wrap around (two's complement), as in PyTorch: in
/// int32, 2³¹ − 1 plus 1 is −2³¹.
Tensor add(const Tensor& a, const Tensor& b);
Tensor add(const Tensor& a, double b);
Tensor add(double a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, double b);
Tensor sub(double a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, double b);
Tensor mul(double a, const Tensor& b);

/// a / b, for floating dtypes.
Tensor div(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, double b);
Tensor div(double a, const Tensor& b);
/// a / b rounded down, for all dtypes except bool. An integer divided by 0 gives 0; the smallest integer divided by −1
/// wraps around. The gradient is 0.
Tensor floor_divide(const Tensor& a, const Tensor& b);
Tensor floor_divide(const Tensor& a, double b);
Tensor floor_divide(double a, const Tensor& b);
/// The remainder of a / b with the sign of a, for all dtypes except bool. For integers, it is 0 where b is 0.
Tensor fmod(const Tensor& a, const Tensor& b);
Tensor fmod(const Tensor& a, double b);
Tensor fmod(double a, const Tensor& b);
/// aᵇ, for floating dtypes; pow(Tensor, double) is in unary.h.
Tensor pow(const Tensor& a, const Tensor& b);
Tensor pow(double a, const Tensor& b);

/// The larger and the smaller of a and b, for all dtypes except bool; NaN if either is NaN. Where a equals b, each gets
/// half of the gradient.
Tensor maximum(const Tensor& a, const Tensor& b);
Tensor maximum(const Tensor& a, double b);
Tensor minimum(const Tensor& a, const Tensor& b);
Tensor minimum(const Tensor& a, double b);

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator+(const Tensor& a, double b) { return add(a, b); }
inline Tensor operator+(double a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator-(const Tensor& a, double b) { return sub(a, b); }
inline Tensor operator-(double a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator*(const Tensor& a, double b) { return mul(a, b); }
inline Tensor operator*(double a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator/(const Tensor& a, double b) { return div(a, b); }
inline Tensor operator/(double a, const Tensor& b) { return div(a, b); }

}  // namespace mica
