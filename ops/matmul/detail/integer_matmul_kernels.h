#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// out[i] = a[i] · b[i] for integers, which wrap around. All are row-major and of one integer dtype.
struct IntegerMatmul {
  const Tensor& a;    // (batch, M, K)
  const Tensor& b;    // (batch, K, N)
  const Tensor& out;  // (batch, M, N)
};

void integer_matmul(Cpu, const IntegerMatmul& args);
void integer_matmul(Cuda, const IntegerMatmul& args);

}  // namespace mica::kernels
