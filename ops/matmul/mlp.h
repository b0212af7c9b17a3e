#pragma once

#include <mica/ops/matmul/matmul.h>

namespace mica {

/// Two linear layers with an activation between them, as the feed-forward part of a transformer has:
///
///   y = f(x · weight1ᵀ + bias1) · weight2ᵀ + bias2
///
/// @param x        (…, in), floating.
/// @param weight1  (hidden, in), of x's dtype and device, as all that follow.
/// @param bias1    (hidden), or undefined.
/// @param weight2  (out, hidden).
/// @param bias2    (out), or undefined.
/// @return (…, out). Differentiable any number of times.
///
/// Forward is linear(linear(x, weight1, bias1, f), weight2, bias2), to the bit. Backward differs from theirs by
/// rounding: where a kernel has it (gelu_tanh in 16 bits on CUDA), the product with weight2 goes on with f′ and the
/// gradient of bias1, so that the gradient of f's result is never rounded or stored.
///
/// Throws Error before anything is computed if a shape, dtype or device does not fit.
Tensor mlp(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2, const Tensor& bias2,
           Activation activation);

}  // namespace mica
