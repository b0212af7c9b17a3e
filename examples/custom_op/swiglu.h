#pragma once

#include <mica/core/tensor.h>

namespace custom {

/// The gate of a SwiGLU feed-forward layer, in one pass over its inputs:
///
///   y = silu(gate) · up,   silu(g) = g · sigmoid(g)
///
/// gate and up have the same shape, floating dtype and device, and any strides and size. The result is row-major and
/// differentiable any number of times. Throws mica::Error if shapes, dtypes or devices differ.
///
/// Shazeer: GLU Variants Improve Transformer (2020), arXiv:2002.05202.
mica::Tensor swiglu(const mica::Tensor& gate, const mica::Tensor& up);

}  // namespace custom
