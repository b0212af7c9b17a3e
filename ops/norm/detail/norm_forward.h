#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

inline const Tensor kAbsent;

/// The forward of every norm of rows. All tensors are contiguous and on the kernel's device, and no size is 0. "sums"
/// is float32, or float64 where x is.
///
///   s = x, or, if there is a residual, s = sum = residual + dropped(x + x_bias), rounded to x's dtype
///   y = (s − mean) · rstd · weight + bias,    rstd = 1 / √(mean((s − mean)²) + eps)
///
/// row by row. Not centered, it is an RMS norm: mean is 0 in both lines.
struct NormForward {
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  bool centered;
  double eps;
  const Tensor& x;                 // (M, N)
  const Tensor& weight = kAbsent;  // (N), x's dtype or sums; undefined: 1
  const Tensor& bias = kAbsent;    // (N), weight's dtype; undefined: 0
  const Tensor& y;                 // out (M, N), x's dtype
  const Tensor& mean = kAbsent;    // out (mean_parts, M), sums; undefined: not wanted, or not centered
  const Tensor& rstd = kAbsent;    // out (M), sums; undefined: not wanted
  // Undefined if x itself is normalized:
  const Tensor& residual = kAbsent;  // (M, N), x's dtype
  const Tensor& x_bias = kAbsent;    // (N), x's dtype; undefined: 0
  ElementDropout dropout = {};       // of x + x_bias, element by element as mica::dropout
  const Tensor& sum = kAbsent;       // out (M, N), x's dtype
};

/// Without a residual.
void norm_forward(Cpu, const NormForward& args);
void norm_forward(Cuda, const NormForward& args);

/// With a residual. There are kernels for CUDA only, and not for every shape: they return whether they did it. Else
/// kernels of other ops write the sum.
inline bool add_norm_forward(Cpu, const NormForward&) { return false; }
bool add_norm_forward(Cuda, const NormForward& args);

// What the kernels of every device share.

/// Whether a centered forward leaves what the rounding of a row's mean adds to each of its x̂ = (x − mean[0]) · rstd +
/// mean[1]. Where x has 16 bits, its own roundings are larger, and mean[0] alone is left.
constexpr bool has_mean_rest(std::size_t size_of_x) { return size_of_x > 2; }
inline std::int64_t mean_parts(DType x) { return has_mean_rest(size_of(x)) ? 2 : 1; }

/// mean[1] of a kernel's argument; null if it has none.
template <class S>
S* mean_rest_of(const Tensor& mean) {
  return mean.defined() && mean.size(0) == 2 ? mean.data<S>() + mean.size(1) : nullptr;
}

/// Brings a row whose squares overflow into range; a power of 2, so that it rounds nothing.
template <class S>
constexpr S kShrink = std::is_same_v<S, double> ? S(0x1p-600) : S(0x1p-80);

/// (shift + mean, rounded) − (shift + mean). Exact where shift is the larger one; else off by no more than mean, which
/// is about as large as the row's elements are apart, is itself.
template <class S>
constexpr S mean_rounding(S shift, S mean) {
  return ((shift + mean) - shift) - mean;
}

}  // namespace mica::kernels
