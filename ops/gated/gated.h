#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/elementwise/unary.h>

namespace mica {

// Fused gated activations for feed-forward layers (Shazeer: GLU Variants Improve Transformer, 2020, arXiv:2002.05202).
// Derivation and kernels: README.md beside this file.
//
// gate and up have the same shape, floating dtype and device, and any strides; they may be empty. The overloads with
// one tensor x (…, 2 n) take the halves of its last axis, x = [gate | up], as a single linear layer computes them, and
// return (…, n). The result is row-major, has the inputs' dtype, and is differentiable any number of times. 16-bit
// floats are computed in float32 and rounded once. All throw Error before anything is computed if a shape, dtype or
// device does not match.

/// gelu(gate) · up, with GELU as in mica::gelu.
Tensor geglu(const Tensor& gate, const Tensor& up, GeluApproximation approximation = GeluApproximation::none);
Tensor geglu(const Tensor& x, GeluApproximation approximation = GeluApproximation::none);

/// silu(gate) · up, with silu(g) = g · sigmoid(g).
Tensor swiglu(const Tensor& gate, const Tensor& up);
Tensor swiglu(const Tensor& x);

}  // namespace mica
