#pragma once

#include <cstdint>

#include <mica/ops/norm/detail/norm_forward.h>

namespace mica::kernels {

// All tensors are contiguous and on the kernel's device, and no size is 0. "sums" below is float32, or float64 where x
// is.

void rms_norm_forward(Cpu, const NormForward& args);

/// The gradients of a norm that is not centered; whichever of dx and dweight is undefined is not wanted, one at least
/// is.
struct RMSNormBackward {
  std::int64_t rows;
  std::int64_t columns;
  const Tensor& dy;       // (M, N), x's dtype
  const Tensor& x;        // (M, N)
  const Tensor& weight;   // (N) or undefined
  const Tensor& rstd;     // (M)
  const Tensor& dx;       // out (M, N), x's dtype
  const Tensor& dweight;  // out (N), x's dtype or sums
};

void rms_norm_backward(Cpu, const RMSNormBackward& args);
void rms_norm_backward(Cuda, const RMSNormBackward& args);

}  // namespace mica::kernels
