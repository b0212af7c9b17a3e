#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Diagonals of matrices, for any dtype. Diagonal 0 is the main one, positive ones are above it, negative ones below.
// All are differentiable any number of times.

/// The diagonal of each matrix in the axes a (rows) and b (columns), as the last axis of the result, which is a view.
/// Throws if x has no such axes, or if both are the same. A diagonal outside of the matrix has no elements.
Tensor diagonal(const Tensor& x, std::int64_t offset = 0, std::int64_t a = 0, std::int64_t b = 1);

/// Square matrices in the last two axes, with the last axis of x (…, n) on the diagonal and zeros elsewhere:
/// (…, n + |offset|, n + |offset|).
Tensor diag_embed(const Tensor& x, std::int64_t offset = 0);

/// For a vector, the matrix diag_embed(x, offset); for a matrix, a copy of diagonal(x, offset). Throws for other
/// numbers of axes.
Tensor diag(const Tensor& x, std::int64_t offset = 0);

/// The sum of the main diagonal of a matrix; int64 for integers and bool. Throws unless x has two axes.
Tensor trace(const Tensor& x);

}  // namespace mica
