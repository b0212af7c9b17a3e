#pragma once

// The two kernels for tensor cores. Included by .cu files only.

#include <mica/ops/quantized/detail/product_cuda.cuh>
#include <mica/ops/quantized/detail/quantized_kernels.h>

namespace mica::kernels::quantized_cuda {

inline constexpr int kFewTensorRows = 16;

/// For at most kFewTensorRows rows, on GPUs with clusters.
void multiply_few_rows(const Tensor& x, int bits, const Product& product);

/// For any number of rows, on compute capability 9.0. Returns false, and computes nothing, if the GPU or the sizes are
/// not supported.
bool multiply_many_rows(const Tensor& x, int bits, const Product& product);

}  // namespace mica::kernels::quantized_cuda
