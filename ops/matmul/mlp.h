#pragma once

#include <mica/ops/matmul/matmul.h>

namespace mica {

/// Two linear layers with an activation in between, such as the feed-forward part of a transformer:
///
///   y = f(x · weight1ᵀ + bias1) · weight2ᵀ + bias2
///
/// @param x        (…, in), floating.
/// @param weight1 (hidden, in), of x's dtype and device, like all
/// following arguments. @param bias1 (hidden), or undefined.
/// @param weight2 (out, hidden). @param bias2 (out), or
/// undefined. @return (…, out). Differentiable any number of
/// times.
///
/// Forward is bit-identical to linear(linear(x, weight1, bias1, f), weight2, bias2). Backward differs from theirs by
/// rounding: where a kernel supports it (gelu_tanh in 16 bits on CUDA), the product with weight2 also applies f′ and
/// sums the gradient of bias1, so that the gradient of f's result is never rounded or stored.
///
/// Throws Error before anything is computed if a shape, dtype or device does not match.
Tensor mlp(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2, const Tensor& bias2,
           Activation activation);

}  // namespace mica
