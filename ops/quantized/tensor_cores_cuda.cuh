#pragma once

#include <mica/ops/quantized/fragments_cuda.cuh>
#include <mica/ops/quantized/quantized_kernels.h>

namespace mica::kernels::quantized_cuda {

/// The kernel for any number of rows, of compute capability 9.0; false, and nothing done, where the chip or the sizes
/// do not allow it.
bool multiply_many_rows(const QuantizedMatmulForward& args, const Product& product);

}  // namespace mica::kernels::quantized_cuda
