#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// out = Σ x², in an order that depends on x's size alone. x is row-major and floating, out a float64 scalar.
void sum_of_squares(Cpu, const Tensor& x, const Tensor& out);
void sum_of_squares(Cuda, const Tensor& x, const Tensor& out);

/// x ← factor · x, for a row-major x.
void scale(Cpu, const Tensor& x, double factor);
void scale(Cuda, const Tensor& x, double factor);

/// `scale` as an update in which x is its own gradient.
template <class A>
struct ScaleRule {
  A factor;

  explicit ScaleRule(double by) : factor(static_cast<A>(by)) {}

  MICA_HOST_DEVICE void operator()(A& value, A) const { value *= factor; }
};

}  // namespace mica::kernels
