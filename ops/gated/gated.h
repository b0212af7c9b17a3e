#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/elementwise/unary.h>

namespace mica {

// Fused gated activations for feed-forward layers (Shazeer: GLU Variants Improve Transformer, 2020, arXiv:2002.05202).
// Derivation and kernels: README.md beside this file.
//
// gate and up have one shape, floating dtype and device, and any strides and size, including no elements. With one
// argument, they are the halves of x along its last axis, [gate | up], as a single linear layer produces them: x is (…,
// 2 n) and the result (…, n). The result is row-major, has their dtype, and is differentiable any number of times.
// Arithmetic on 16-bit floats is done in float32 and rounded once. Throws Error before anything is computed if a shape,
// dtype or device does not match.

/// gelu(gate) · up, with GELU as in mica::gelu.
Tensor geglu(const Tensor& gate, const Tensor& up, GeluApproximation approximation = GeluApproximation::none);
Tensor geglu(const Tensor& x, GeluApproximation approximation = GeluApproximation::none);

/// silu(gate) · up, with silu(g) = g · sigmoid(g).
Tensor swiglu(const Tensor& gate, const Tensor& up);
Tensor swiglu(const Tensor& x);

}  // namespace mica
