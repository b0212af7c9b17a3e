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

/// sum += a · b, of one floating dtype; M, N and K are not 0.
struct MatmulAddArgs {
  Tensor a;    // (M, K), readable
  Tensor b;    // (K, N), readable
  Tensor sum;  // (M, N) contiguous, in the accumulate dtype
};

void matmul_add(Cpu, const MatmulAddArgs& args);
void matmul_add(Cuda, const MatmulAddArgs& args);

}  // namespace mica::kernels
