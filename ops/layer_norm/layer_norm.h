#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Layer normalization: every row is shifted and scaled to mean 0 and variance 1, then weighted.
///
///   y = (x − mean) / √(var + eps) · weight + bias
///
/// A row is what lies under the trailing axes `normalized_shape`; mean and var = mean((x − mean)²) are taken over it.
///
/// @param x                 (…, normalized_shape…), floating, any strides. Any number of rows, none included.
/// @param normalized_shape  the last one or more axes of x.
/// @param weight, bias      of normalized_shape, each optional (undefined: 1 and 0), in one dtype: x's own or, for
///                          16-bit x, also float32.
/// @param eps               added to the variance, under the root; at least 0.
/// @return of x's shape and dtype, row-major. Differentiable in x, weight and bias.
///
/// Statistics and sums are kept in float32 (float64 for float64 x). What a row gives does not depend on the other rows
/// and is the same from run to run. A row whose elements are all equal gives the bias exactly; the variance of values
/// up to the largest float does not overflow.
///
/// Throws Error before anything is computed if a shape, dtype or device does not fit.
///
/// Ba, Kiros, Hinton: Layer Normalization (2016), arXiv:1607.06450. Derivation and kernels: README.md beside this file.
Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);

}  // namespace mica
