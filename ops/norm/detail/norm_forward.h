#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>

namespace mica::kernels {

inline const Tensor kAbsent;

/// Arguments of the forward of all row norms. All tensors are contiguous and on the kernel's device, and no size is 0.
/// Below, "sums" means the dtype of sums: float32, or float64 if x is float64. For each row, forward computes
///
///   s = x, or, if there is a residual, s = sum = residual + dropped(x + x_bias), rounded to x's dtype
///   y = (s − mean) · rstd · weight + bias,    rstd = 1 / √(mean((s − mean)²) + eps)
///
/// If not centered, this is an RMS norm: the row's mean is replaced by 0 in both formulas of the second line.
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
  // For norms of sums. These tensors are undefined if x itself is normalized:
  const Tensor& residual = kAbsent;  // (M, N), x's dtype
  const Tensor& x_bias = kAbsent;    // (N), x's dtype; undefined: 0
  ElementDropout dropout = {};       // applied to x + x_bias; drops the same elements as mica::dropout
  const Tensor& sum = kAbsent;       // out (M, N), x's dtype
};

/// Normalizes x. On CUDA, `args` has no residual.
void norm_forward(Cpu, const NormForward& args);
void norm_forward(Cuda, const NormForward& args);

/// Computes a sum and normalizes it. `args` has a residual. Returns false, and computes nothing, if there is no kernel:
/// with dropout on the CPU, and for some shapes on CUDA.
bool add_norm_forward(Cpu, const NormForward& args);
bool add_norm_forward(Cuda, const NormForward& args);

// Shared by the kernels of both devices.

/// Whether a centered forward also saves mean[1], the rounding error of mean[0] times rstd, with which backward
/// computes x̂ = (x − mean[0]) · rstd + mean[1]. 16-bit x has larger rounding errors of its own.
constexpr bool has_mean_rest(std::size_t size_of_x) { return size_of_x > 2; }
inline std::int64_t mean_parts(DType x) { return has_mean_rest(size_of(x)) ? 2 : 1; }

/// A pointer to mean[1]; null if `mean` does not have it.
template <class S>
S* mean_rest_of(const Tensor& mean) {
  return mean.defined() && mean.size(0) == 2 ? mean.data<S>() + mean.size(1) : nullptr;
}

/// Rows whose squares overflow are multiplied by this factor. It is a power of 2, so the product has no rounding error.
template <class S>
constexpr S kShrink = std::is_same_v<S, double> ? S(0x1p-600) : S(0x1p-80);

/// The rounding error of shift + mean: (shift + mean, rounded) − (shift + mean). It is exact if shift is the larger
/// number; otherwise its error is at most that of mean.
template <class S>
constexpr S mean_rounding(S shift, S mean) {
  return ((shift + mean) - shift) - mean;
}

}  // namespace mica::kernels
