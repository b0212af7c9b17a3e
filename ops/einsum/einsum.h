#pragma once

#include <string_view>

#include <mica/core/tensor.h>

namespace mica {

/// Einstein's summation: products of the operands' elements, summed over the axes that the result does not have.
///
///     einsum("ij,jk->ik", {a, b})          matrix product
///     einsum("bij,bjk", {a, b})            of batches; the result's letters are those that occur once, in order
///     einsum("ii->i", {a})                 diagonal
///     einsum("...hqd,...hkd->...hqk", …)   any leading axes
///     einsum("i,ij,j", {x, a, y})          several operands, two at a time, the cheapest product first
///
/// @param equation  a term per operand, separated by commas. A term has a letter (a to z, A to Z) for each axis, and
///                  may have one "..." for further axes, aligned at the last. A letter twice in a term takes the
///                  diagonal. After "->" comes the result's term; axes that are not in it are summed over. Without
///                  "->", the result has the ellipsis and then, in alphabetical order, capitals first, the letters
///                  that occur once. Spaces are ignored.
/// @param operands  of one floating dtype and device. A letter has the same size in all operands, or 1, which
///                  broadcasts.
///
/// Products are calls of matmul(), and are rounded as there; products that sum over nothing are calls of mul().
/// Differentiable any number of times. Throws Error, which names the letter and the sizes, if the equation is malformed
/// or does not fit the operands, and if a result of two of them would have more than 8 axes.
Tensor einsum(std::string_view equation, const Tensors& operands);

/// The product of a and b, summed over the last `axes` axes of a and the first ones of b, in order: with 1, a matrix
/// product; with 0, all products. The result has the other axes of a, then those of b. Otherwise as einsum().
Tensor tensordot(const Tensor& a, const Tensor& b, std::int64_t axes = 2);
/// The same for axes a_axes[i] of a and b_axes[i] of b.
Tensor tensordot(const Tensor& a, const Tensor& b, const Dims& a_axes, const Dims& b_axes);

/// a[i] · b[j] of two vectors of any numeric dtype: (M), (N) → (M, N). Throws Error for other shapes.
Tensor outer(const Tensor& a, const Tensor& b);

/// The sum of products over the last axes: (…a, K), (…b, K) → (…a, …b). If one of them is a scalar, a · b. As
/// einsum().
Tensor inner(const Tensor& a, const Tensor& b);

/// The Kronecker product: blocks a[i, j, …] · b, so that axis k has length a.size(k) · b.size(k), for any numeric
/// dtype. If one has fewer axes, it gets leading axes of length 1. Throws Error if both together have more than 8.
Tensor kron(const Tensor& a, const Tensor& b);

}  // namespace mica
