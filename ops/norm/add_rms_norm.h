#pragma once

#include <mica/core/tensor.h>

namespace mica {

struct AddRMSNormOptions {
  double p = 0;  ///< the probability of dropout
  bool training = true;
  double eps = 1e-6;
  Tensor x_bias{};  ///< added to x first, such as the bias of the linear layer that computed x
};

struct AddRMSNormResult {
  Tensor sum;  ///< the new residual
  Tensor y;    ///< its norm
};

/// Dropout, residual sum and RMS norm, as between two layers of a transformer, in one pass over the inputs:
///
///   sum = residual + dropout(x + x_bias, p),    y = rms_norm(sum, normalized_shape, weight, eps)
///
/// @param x, residual       (…, normalized_shape…), of the same shape, floating dtype and device; any strides.
/// @param normalized_shape  the last one or more axes of x.
/// @param weight            of normalized_shape, optional (undefined: 1): x's dtype or, for 16-bit x, also float32.
/// @param options           p in [0, 1), which has no effect if not training; eps ≥ 0;
///                          x_bias of normalized_shape and x's dtype, or undefined: 0.
/// @return sum and y, of x's shape and dtype, row-major. Differentiable any number of times.
///
/// y is computed from the returned sum, which is rounded to x's dtype. Elements are dropped as by mica::dropout. See
/// mica::rms_norm for the rest. Throws Error before anything is computed if a shape, dtype, device or option does not
/// match.
AddRMSNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Shape& normalized_shape,
                              const Tensor& weight = {}, AddRMSNormOptions options = {});

}  // namespace mica
