#pragma once

// Products whose epilogue costs about as much as they do, by a kernel for compute capability 9.0. False: not for these
// tensors or this device; nothing was computed.

#include <mica/ops/matmul/matmul_kernels.h>

namespace mica::kernels {

bool matmul_with_epilogue(const MatmulArgs& args);
bool matmul_with_epilogue(const MatmulActivationBackward& args);

/// total = the sums of the columns of `parts` (n, columns), which is in total's accumulate dtype; in a fixed order.
void add_parts(const Tensor& parts, const Tensor& total);

}  // namespace mica::kernels
