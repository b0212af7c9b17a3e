#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/quantized/quantized.h>

namespace mica::kernels {

// In all arguments, the weight has been checked and its tensors are contiguous and on the kernel's device; M, N and K
// are not 0.

/// y = rows · (x · w) · columns.
struct QuantizedMatmulForward {
  QuantizedWeight weight;  // w (K, N)
  Tensor x;                // (M, K) contiguous
  Tensor columns;          // (N) contiguous, of the accumulation dtype, or undefined
  Tensor rows;             // (M), like columns
  Tensor y;                // (M, N) contiguous, of the dtype of x; out
  bool rounds_x = false;   // whether x may be rounded to 8 bits: see RoundActivations
};

void quantized_matmul_forward(Cpu, const QuantizedMatmulForward& args);
void quantized_matmul_forward(Cuda, const QuantizedMatmulForward& args);

/// dx = (rows · dy · columns) · wᵀ.
struct QuantizedMatmulBackward {
  QuantizedWeight weight;
  Tensor dy;       // (M, N) contiguous
  Tensor columns;  // as in forward
  Tensor rows;
  Tensor dx;  // (M, K) contiguous, of the dtype of dy; out
};

void quantized_matmul_backward(Cpu, const QuantizedMatmulBackward& args);
void quantized_matmul_backward(Cuda, const QuantizedMatmulBackward& args);

/// out = w.
struct Dequantize {
  QuantizedWeight weight;
  Tensor out;  // (K, N) contiguous, floating
};

void dequantize(Cpu, const Dequantize& args);
void dequantize(Cuda, const Dequantize& args);

}  // namespace mica::kernels
