#pragma once

#include <array>

#include <mica/autograd/function.h>
#include <mica/core/tensor.h>
#include <mica/ops/norm/detail/norm_checks.h>

namespace mica::norm {

/// x with its elements in row-major order; undefined if x is.
Tensor contiguous_or_absent(const Tensor& x);

/// (dy, x, weight, mean, rstd) → (dx, dweight, dbias) by the fused kernels, those that are not wanted undefined.
/// Differentiable in dy, x and weight any number of times. mean and rstd are x's, not arguments of their own: undefined
/// if x has no elements, and mean, if the norm is not centered. README.md derives what its backward computes.
struct NormGradient {
  static constexpr bool composed = true;
  RowNorm norm;
  std::array<bool, 3> wanted;

  Tensors forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                  const Tensor& rstd) const;
  /// a, b, c: the gradients of dx, dweight and dbias, undefined where none came.
  Tensors backward(autograd::Context& ctx, const Tensor& a, const Tensor& b, const Tensor& c) const;
};

}  // namespace mica::norm
