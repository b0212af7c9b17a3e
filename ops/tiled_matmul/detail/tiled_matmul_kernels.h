#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::kernels {

/// y = f(a · b). All tensors have the same floating dtype; M, N and K are not 0.
struct TiledMatmulArgs {
  Tensor a;               // (M, K), any strides
  Tensor b;               // (K, N), any strides
  Activation activation;  // f: none or leaky_relu
  Tensor y;               // (M, N) contiguous; out
};

void tiled_matmul(Cpu, const TiledMatmulArgs& args);
void tiled_matmul(Cuda, const TiledMatmulArgs& args);

}  // namespace mica::kernels
