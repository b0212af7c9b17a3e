#pragma once

// Checks of the arguments of the public norms.

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica::norm {

/// How rows are normalized.
struct RowNorm {
  bool centered;  // layer norm; else RMS norm
  std::int64_t rows;
  std::int64_t columns;
  Shape row_shape;     // the normalized axes, the last ones of x
  DType weight_dtype;  // of weight and bias
  double eps;
};

/// Returns how the rows of x are normalized. Throws an Error that names `op` unless
/// - x is floating, and its shape ends in normalized_shape, which has at least one axis;
/// - weight and bias, if defined, have the shape normalized_shape, are on x's device, and have the same dtype, which is
///   that of x or of its sums;
/// - eps ≥ 0.
RowNorm check_norm(const char* op, bool centered, const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                   const Tensor& bias, double eps);

/// Throws an Error that names `op` unless
/// - residual has the shape, dtype and device of x;
/// - x_bias, if defined, has the shape normalized_shape and the dtype and device of x;
/// - p is in [0, 1).
void check_addends(const char* op, const Tensor& x, const Tensor& residual, const Tensor& x_bias,
                   const Shape& normalized_shape, double p);

}  // namespace mica::norm
