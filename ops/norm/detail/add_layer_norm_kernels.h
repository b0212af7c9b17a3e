#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>
#include <mica/ops/norm/detail/norm_forward.h>

namespace mica::kernels {

// All tensors are contiguous and on the kernel's device, and no size is 0. "sums" below is float32, or float64 where x
// is. There are kernels for CUDA only, and not for every shape: they return whether they did it. Else kernels of other
// ops do it one after another.

/// dresidual = dsum + the gradient of the norm in the sum, dx = what dropout leaves of it; whichever of the outputs is
/// undefined is not wanted.
struct AddLayerNormBackward {
  std::int64_t rows;
  std::int64_t columns;
  const Tensor& dsum;       // (M, N), x's dtype
  const Tensor& dy;         // (M, N)
  const Tensor& sum;        // (M, N)
  const Tensor& weight;     // (N) or undefined
  const Tensor& mean;       // as forward left it
  const Tensor& rstd;       // (M)
  ElementDropout dropout;   // of x, element by element as mica::dropout
  const Tensor& dresidual;  // out (M, N), x's dtype
  const Tensor& dx;         // out (M, N); undefined where nothing is dropped, as it is dresidual then
  const Tensor& dweight;    // out (N), x's dtype or sums
  const Tensor& dbias;      // out (N), dweight's dtype where both are defined
  const Tensor& dx_bias;    // out (N), x's dtype: the sum of dx's rows; only if add_layer_norm_sums_dx() says so
};

/// Whether the kernel adds up dx_bias too, which takes registers that longer rows have not.
constexpr bool add_layer_norm_sums_dx(DType dtype, std::int64_t columns) {
  return size_of(dtype) == 2 && columns <= 1536;
}

inline bool add_layer_norm_backward(Cpu, const AddLayerNormBackward&) { return false; }
bool add_layer_norm_backward(Cuda, const AddLayerNormBackward& args);

}  // namespace mica::kernels
