#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// Root mean square normalization: every row is scaled to mean square 1, then weighted.
///
///   y = x / √(mean(x²) + eps) · weight
///
/// A row is a slice of x over the trailing axes `normalized_shape`; the mean is over a row.
///
/// @param x                 (…, normalized_shape…), floating, any strides. Any number of rows, including 0.
/// @param normalized_shape  the last one or more axes of x.
/// @param weight            of normalized_shape, optional (undefined: 1): x's dtype or, for 16-bit x, also float32.
/// @param eps               added to the mean square, under the root; at least 0.
/// @return y, of x's shape and dtype, row-major. Differentiable in x and weight any number of times.
///
/// Sums are kept in float32 (float64 for float64 x). The result of a row does not depend on the values of other rows
/// and is bit-identical from run to run. On a GPU, its last bits depend on whether all tensors are aligned to 16 bytes
/// and, for aligned rows of more than 16,384 elements, on the number of rows. If the sum of a row's squares overflows
/// float32 (float64), its y is 0.
///
/// Throws Error before anything is computed if a shape, dtype or device does not match.
///
/// Zhang, Sennrich: Root Mean Square Layer Normalization (2019), arXiv:1910.07467. Derivation and kernels: README.md
/// beside this file.
Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {}, double eps = 1e-6);

}  // namespace mica
