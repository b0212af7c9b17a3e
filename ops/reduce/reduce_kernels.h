#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// In all of these x has any strides, and the result y is row-major and has x's shape but for the reduced axes, which
// have length 1.

/// y = Σ x / divisor. y has x's dtype if that is floating, else int64 (and divisor is 1).
struct Sum {
  const Tensor& x;
  double divisor;
  const Tensor& y;
};
void sum(Cpu, const Sum& args);
void sum(Cuda, const Sum& args);

}  // namespace mica::kernels
