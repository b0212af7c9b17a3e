#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// All tensors are contiguous and on the kernel's device, and no size is 0. "sums" below is float32, or float64 where x
// is.

/// y = x · rstd · weight, row by row; rstd = 1 / √(mean(x²) + eps).
struct RMSNormForward {
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  const Tensor& x;       // (M, N)
  const Tensor& weight;  // (N), x's dtype or sums; undefined: 1
  double eps;
  const Tensor& y;     // out (M, N), x's dtype
  const Tensor& rstd;  // out (M), sums; undefined: not wanted
};

void rms_norm_forward(Cpu, const RMSNormForward& args);
void rms_norm_forward(Cuda, const RMSNormForward& args);

/// The gradients of the above; whichever of dx and dweight is undefined is not wanted, one at least is.
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
