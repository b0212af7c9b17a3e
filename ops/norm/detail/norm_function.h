#pragma once

// The differentiable Functions of the norms. Each public norm derives a Function of its own from one of them, so that
// nodes of the graph have its name.

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

/// (x, residual, weight, bias, x_bias) → (sum, y): sum = residual + dropped(x + x_bias), and y is the norm of sum.
struct AddNorm {
  static constexpr bool composed = true;
  RowNorm norm;
  ElementDropout dropout;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                const Tensor& bias, const Tensor& x_bias) const;
  Tensors backward(autograd::Context& ctx, const Tensor& dsum, const Tensor& dy) const;

 private:
  // Computes all gradients by one kernel. Returns an empty list if there is no such kernel.
  Tensors backward_in_one_pass(const autograd::Context& ctx, const std::array<Tensor, 4>& saved, const Tensor& dsum,
                               const Tensor& dy) const;
};

/// Draws the random key that determines which elements are dropped. Nothing is dropped if not training, or if p is 0.
ElementDropout draw_dropout(double p, bool training);

}  // namespace mica::norm
