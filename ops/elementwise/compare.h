#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Element-wise comparisons and logic, which return bool tensors and are not differentiable. They throw Error if dtypes
// or devices differ, or if shapes do not broadcast.

/// a = b, a ≠ b, a < b, a ≤ b, a > b and a ≥ b, between two tensors of the same dtype and device, whose shapes
/// broadcast, or between a tensor and a number, which is rounded to the tensor's dtype. All dtypes. As in IEEE 754, NaN
/// is unequal to everything, and neither less nor greater.
Tensor eq(const Tensor& a, const Tensor& b);
Tensor eq(const Tensor& a, double b);
Tensor ne(const Tensor& a, const Tensor& b);
Tensor ne(const Tensor& a, double b);
Tensor lt(const Tensor& a, const Tensor& b);
Tensor lt(const Tensor& a, double b);
Tensor le(const Tensor& a, const Tensor& b);
Tensor le(const Tensor& a, double b);
Tensor gt(const Tensor& a, const Tensor& b);
Tensor gt(const Tensor& a, double b);
Tensor ge(const Tensor& a, const Tensor& b);
Tensor ge(const Tensor& a, double b);

/// isnan: whether x is NaN; isfinite: whether it is neither NaN nor infinite. All dtypes; integers and bools are
/// finite.
Tensor isnan(const Tensor& x);
Tensor isfinite(const Tensor& x);

/// For bool tensors on one device, whose shapes broadcast. Any other dtype throws.
Tensor logical_and(const Tensor& a, const Tensor& b);
Tensor logical_or(const Tensor& a, const Tensor& b);
Tensor logical_not(const Tensor& a);

inline Tensor operator==(const Tensor& a, const Tensor& b) { return eq(a, b); }
inline Tensor operator==(const Tensor& a, double b) { return eq(a, b); }
inline Tensor operator!=(const Tensor& a, const Tensor& b) { return ne(a, b); }
inline Tensor operator!=(const Tensor& a, double b) { return ne(a, b); }
inline Tensor operator<(const Tensor& a, const Tensor& b) { return lt(a, b); }
inline Tensor operator<(const Tensor& a, double b) { return lt(a, b); }
inline Tensor operator<=(const Tensor& a, const Tensor& b) { return le(a, b); }
inline Tensor operator<=(const Tensor& a, double b) { return le(a, b); }
inline Tensor operator>(const Tensor& a, const Tensor& b) { return gt(a, b); }
inline Tensor operator>(const Tensor& a, double b) { return gt(a, b); }
inline Tensor operator>=(const Tensor& a, const Tensor& b) { return ge(a, b); }
inline Tensor operator>=(const Tensor& a, double b) { return ge(a, b); }

}  // namespace mica
