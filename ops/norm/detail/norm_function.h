#pragma once

// What the public norms record in the graph. Each derives a Function of its own, which names its nodes.

#include <array>

#include <mica/autograd/function.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>
#include <mica/ops/norm/detail/norm_checks.h>

namespace mica::norm {

/// (x, weight, bias) → y
struct Norm {
  static constexpr bool composed = true;
  RowNorm norm;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) const;
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const;
};

/// (x, residual, weight, bias, x_bias) → (sum, y): sum = residual + dropped(x + x_bias), of which y is the norm.
struct AddNorm {
  static constexpr bool composed = true;
  RowNorm norm;
  ElementDropout dropout;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                const Tensor& bias, const Tensor& x_bias) const;
  Tensors backward(autograd::Context& ctx, const Tensor& dsum, const Tensor& dy) const;

 private:
  // All gradients by one kernel, where there is one: else undefined.
  Tensors backward_in_one_pass(const autograd::Context& ctx, const std::array<Tensor, 4>& saved, const Tensor& dsum,
                               const Tensor& dy) const;
};

/// Draws the elements to drop: none if not training.
ElementDropout draw_dropout(double p, bool training);

}  // namespace mica::norm
