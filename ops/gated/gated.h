#pragma once

#include <mica/core/tensor.h>
#include <mica/ops/elementwise/unary.h>

namespace mica {

// Gated activations of a feed-forward layer, in one pass over their inputs (Shazeer: GLU Variants Improve Transformer,
// 2020, arXiv:2002.05202). Derivation and kernels: README.md beside this file.
//
// gate and up are of one shape, one device and one floating dtype; any strides, any size, no elements included. Or they
// are halves of one tensor x along its last axis, [gate | up], as one linear layer makes both: x is (…, 2 n) and the
// result (…, n). The result is row-major, of their dtype, and differentiable any number of times; arithmetic on 16-bit
// floats is done in float32 and rounded once. Throws Error before anything is computed if a shape, dtype or device does
// not fit.

/// gelu(gate) · up, with GELU as in mica::gelu.
Tensor geglu(const Tensor& gate, const Tensor& up, GeluApproximation approximation = GeluApproximation::none);
Tensor geglu(const Tensor& x, GeluApproximation approximation = GeluApproximation::none);

/// silu(gate) · up, with silu(g) = g · sigmoid(g).
Tensor swiglu(const Tensor& gate, const Tensor& up);
Tensor swiglu(const Tensor& x);

}  // namespace mica
