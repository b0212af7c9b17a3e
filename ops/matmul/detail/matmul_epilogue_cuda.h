#pragma once

// Products with expensive epilogues, by a kernel for compute capability 9.0. Functions that return a bool return false,
// and compute nothing, if the tensors or the device are not supported.

#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::kernels {

bool matmul_with_epilogue(const MatmulArgs& args);
bool matmul_with_epilogue(const MatmulActivationBackward& args);

/// total (columns) = the sum over the rows of `parts` (n, columns), which has total's accumulate dtype. The order of
/// the sum is fixed.
void add_parts(const Tensor& parts, const Tensor& total);

}  // namespace mica::kernels
