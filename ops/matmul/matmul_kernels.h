#pragma once

#include <mica/core/dispatch.h>
#include <mica/ops/matmul/layout.h>

namespace mica::kernels {

/// out = a · b + bias, of one floating dtype; M, N, K and the batch are not empty.
struct MatmulArgs {
  Tensor a;     // (…, M, K), readable; leading axes broadcast to those of out
  Tensor b;     // (…, K, N), readable; likewise
  Tensor bias;  // (N) contiguous, or undefined
  Tensor out;   // (…, M, N) contiguous
};

void matmul(Cpu, const MatmulArgs& args);
void matmul(Cuda, const MatmulArgs& args);

}  // namespace mica::kernels
