#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// All tensors are contiguous and on the kernel's device. "sums" below is float32, or float64 where x is.

/// Whether forward leaves what the rounding of a row's mean adds to each of its x̂ = (x − mean[0]) · rstd + mean[1].
/// Where x has 16 bits, its own roundings are larger, and mean[0] alone is left.
constexpr bool has_mean_rest(std::size_t size_of_x) { return size_of_x > 2; }
inline std::int64_t mean_parts(DType x) { return has_mean_rest(size_of(x)) ? 2 : 1; }

/// y = (x − mean) · rstd · weight + bias, row by row; rstd = 1 / √(var + eps). No size is 0.
struct LayerNormForward {
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  const Tensor& x;       // (M, N)
  const Tensor& weight;  // (N), x's dtype or sums; undefined: 1
  const Tensor& bias;    // (N), weight's dtype; undefined: 0
  double eps;
  const Tensor& y;     // out (M, N), x's dtype
  const Tensor& mean;  // out (mean_parts, M), sums; undefined, with rstd: not wanted
  const Tensor& rstd;  // out (M), sums
};

void layer_norm_forward(Cpu, const LayerNormForward& args);
void layer_norm_forward(Cuda, const LayerNormForward& args);

/// The gradients of the above; whichever of dx, dweight and dbias is undefined is not computed, one at least is not.
/// M may be 0: dweight and dbias are 0 then. N is not 0.
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

// What the kernels of every device share.

/// Brings a row whose squares overflow into range; a power of 2, so that it rounds nothing.
template <class S>
constexpr S kShrink = std::is_same_v<S, double> ? S(0x1p-600) : S(0x1p-80);

/// (shift + mean, rounded) − (shift + mean). Exact where shift is the larger one; else off by no more than mean, which
/// is about as large as the row's elements are apart, is itself.
template <class S>
constexpr S mean_rounding(S shift, S mean) {
  return ((shift + mean) - shift) - mean;
}

/// mean[1] of a kernel's argument; null if it has none.
template <class S>
S* mean_rest_of(const Tensor& mean) {
  return mean.defined() && mean.size(0) == 2 ? mean.data<S>() + mean.size(1) : nullptr;
}

}  // namespace mica::kernels
