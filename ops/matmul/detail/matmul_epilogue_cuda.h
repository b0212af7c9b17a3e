#pragma once

// Products with expensive epilogues, by a kernel for compute capability 9.0. Functions return false, without any work,
// if the tensors or the device are not supported.

#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::kernels {

bool matmul_with_epilogue(const MatmulArgs& args);
bool matmul_with_epilogue(const MatmulActivationBackward& args);

/// total = the sums of the columns of `parts` (n, columns), which is in total's accumulate dtype; in a fixed order.
void add_parts(const Tensor& parts, const Tensor& total);

}  // namespace mica::kernels
