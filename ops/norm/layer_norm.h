#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Layer normalization: every row is shifted and scaled to mean 0 and variance 1, then weighted.
///
///   y = (x − mean) / √(var + eps) · weight + bias
///
/// A row is a slice of x over the trailing axes `normalized_shape`; mean and var = mean((x − mean)²) are over a row.
///
/// @param x                 (…, normalized_shape…), floating, any strides. Any number of rows, including 0.
/// @param normalized_shape  the last one or more axes of x.
/// @param weight, bias      of normalized_shape, each optional (undefined: 1 and 0), in one dtype: x's own or, for
///                          16-bit x, also float32.
/// @param eps               added to the variance, under the root; at least 0.
/// @return y, of x's shape and dtype, row-major. Differentiable in x, weight and bias any number of times.
///
/// Statistics and sums are kept in float32 (float64 for float64 x). The result of a row does not depend on the values
/// of other rows and is bit-identical from run to run. On a GPU, its last bits depend on whether all tensors are
/// aligned to 16 bytes and, for aligned rows of more than 16,384 elements (float32: 8192), on the number of rows. A row
/// of equal elements gives exactly the bias. The variance does not overflow, even for values up to the largest float.
///
/// Throws Error before anything is computed if a shape, dtype or device does not match.
///
/// Ba, Kiros, Hinton: Layer Normalization (2016), arXiv:1607.06450. Derivation and kernels: README.md beside this file.
Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);

}  // namespace mica
