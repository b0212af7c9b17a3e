#pragma once

#include <array>

#include <mica/autograd/function.h>
#include <mica/core/tensor.h>
#include <mica/ops/norm/detail/norm_checks.h>

namespace mica::norm {

/// x with its elements in row-major order; undefined if x is.
Tensor contiguous_or_absent(const Tensor& x);

/// (dy, x, weight, mean, rstd) → (dx, dweight, dbias) by the fused kernels. Results that are not wanted are undefined.
/// Differentiable in dy, x and weight any number of times. mean and rstd are functions of x, not independent arguments.
/// They are undefined if x has no elements; mean also if the norm is not centered. README.md derives the formulas of
/// the backward.
struct NormGradient {
  static constexpr bool composed = true;
  RowNorm norm;
  std::array<bool, 3> wanted;

  Tensors forward(autograd::Context& ctx, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean,
                  const Tensor& rstd) const;
  /// a, b and c are the gradients of dx, dweight and dbias. The gradient of a result that was not used is undefined.
  Tensors backward(autograd::Context& ctx, const Tensor& a, const Tensor& b, const Tensor& c) const;
};

}  // namespace mica::norm
