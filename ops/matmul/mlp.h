#pragma once

#include <mica/ops/matmul/matmul.h>

namespace mica {

/// Two linear layers with an activation f in between, such as the feed-forward part of a transformer:
///
///   y = f(x · weight1ᵀ + bias1) · weight2ᵀ + bias2
///
/// @param x        (…, in), floating.
/// @param weight1  (hidden, in), of x's dtype and device, like all following arguments.
/// @param bias1    (hidden), or undefined: none.
/// @param weight2  (out, hidden).
/// @param bias2    (out), or undefined: none.
/// @return (…, out), of x's dtype. Differentiable any number of times.
///
/// Forward is bit-identical to linear(linear(x, weight1, bias1, f), weight2, bias2). Backward may round differently
/// from that: for gelu_tanh in 16 bits on CUDA, where a kernel supports it, the product dy · weight2 also multiplies by
/// f′ and sums the gradient of bias1, so that the gradient of f's result is neither rounded nor stored.
///
/// Throws Error before anything is computed if a shape, dtype or device does not match.
Tensor mlp(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2, const Tensor& bias2,
           Activation activation);

}  // namespace mica
