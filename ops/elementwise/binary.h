#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Element-wise ops on two tensors of one dtype and device, whose shapes broadcast (NumPy's rules), or on a tensor and a
// number. There is no type promotion: different dtypes or devices throw. A number combined with an integer tensor must
// be an integer that its dtype can hold; with a 16-bit float it is a float32. All are differentiable; gradients are
// summed over broadcast axes.

/// For all dtypes but bool. Integers wrap around, two's complement, as in PyTorch: in int32, 2³¹ − 1 plus 1 is −2³¹.
Tensor add(const Tensor& a, const Tensor& b);
Tensor add(const Tensor& a, double b);
Tensor add(double a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, double b);
Tensor sub(double a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, double b);
Tensor mul(double a, const Tensor& b);

/// For floating dtypes.
Tensor div(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, double b);
Tensor div(double a, const Tensor& b);
/// a / b rounded down, for all dtypes but bool. An integer divided by 0 is 0, and the smallest divided by −1 wraps
/// around. Not differentiable: the gradient is 0.
Tensor floor_divide(const Tensor& a, const Tensor& b);
Tensor floor_divide(const Tensor& a, double b);
Tensor floor_divide(double a, const Tensor& b);
/// The remainder of a / b with the sign of a, for all dtypes but bool; of an integer and 0, it is 0.
Tensor fmod(const Tensor& a, const Tensor& b);
Tensor fmod(const Tensor& a, double b);
Tensor fmod(double a, const Tensor& b);
/// aᵇ, for floating dtypes; pow(Tensor, double) is in unary.h.
Tensor pow(const Tensor& a, const Tensor& b);
Tensor pow(double a, const Tensor& b);

/// The larger, the smaller; NaN if either is. Where both are equal, each gets half of the gradient. For all dtypes but
/// bool.
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
