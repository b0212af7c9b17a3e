#pragma once

#include <mica/core/tensor.h>

namespace mica {

struct Closeness {
  double rtol = 1e-5;
  double atol = 1e-8;
  bool equal_nan = false;  ///< whether NaN is close to NaN
};

// For two tensors of the same dtype (any) and device. Not differentiable.

/// |a − b| ≤ atol + rtol · |b|, element by element, as bool; the shapes broadcast. Equal infinities are close. 16-bit
/// floats are compared in float32, integers and bools in float64. Throws if a tolerance is negative, or if a shape,
/// dtype or device does not match.
Tensor isclose(const Tensor& a, const Tensor& b, const Closeness& closeness = {});

/// Whether all elements are close. On CUDA, waits for the device.
bool allclose(const Tensor& a, const Tensor& b, const Closeness& closeness = {});

/// Whether a and b have the same shape and equal elements. NaN is unequal to everything. On CUDA, waits for the device.
/// Throws if dtypes or devices differ.
bool equal(const Tensor& a, const Tensor& b);

}  // namespace mica
