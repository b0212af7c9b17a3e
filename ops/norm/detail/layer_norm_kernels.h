#pragma once

#include <cstdint>

#include <mica/ops/norm/detail/norm_forward.h>

namespace mica::kernels {

/// The gradients of a centered norm; whichever of dx, dweight and dbias is undefined is not computed, one at least is
/// not. M may be 0: dweight and dbias are 0 then. N is not 0.
struct LayerNormBackward {
  std::int64_t rows;
  std::int64_t columns;
  const Tensor& dy;       // (M, N), x's dtype
  const Tensor& x;        // (M, N)
  const Tensor& weight;   // (N) or undefined
  const Tensor& mean;     // (2, M), or (1, M): mean[1] is 0
  const Tensor& rstd;     // (M)
  const Tensor& dx;       // out (M, N), x's dtype
  const Tensor& dweight;  // out (N), x's dtype or sums
  const Tensor& dbias;    // out (N), dweight's dtype where both are defined
};

void layer_norm_backward(Cpu, const LayerNormBackward& args);
void layer_norm_backward(Cuda, const LayerNormBackward& args);

}  // namespace mica::kernels
