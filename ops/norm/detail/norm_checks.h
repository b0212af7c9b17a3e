#pragma once

// The arguments of a norm's public function, checked.

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

/// Throws Error in the name of `op` unless x is floating and of a shape that ends in normalized_shape, of at least one
/// axis; weight and bias, if defined, are of normalized_shape, on x's device, of x's dtype or that of its sums, and of
/// one dtype; eps ≥ 0.
RowNorm check_norm(const char* op, bool centered, const Tensor& x, const Shape& normalized_shape, const Tensor& weight,
                   const Tensor& bias, double eps);

/// Throws Error in the name of `op` unless residual is like x, x_bias, if defined, of normalized_shape, on x's device
/// and of its dtype, and p in [0, 1).
void check_addends(const char* op, const Tensor& x, const Tensor& residual, const Tensor& x_bias,
                   const Shape& normalized_shape, double p);

}  // namespace mica::norm
