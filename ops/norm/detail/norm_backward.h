#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>
#include <mica/ops/norm/detail/norm_forward.h>

namespace mica::kernels {

/// The arguments of the backward kernels of all norms. All tensors are contiguous and on the kernel's device. Below,
/// the dtype "sums" is float32, or float64 if x is float64. With g = dy · weight, x̂ = (x − mean) · rstd and ⟨·⟩ the
/// mean over a row,
///
///   dx = rstd · (g − ⟨g⟩ − x̂ · ⟨g · x̂⟩) + dsum,    dweight = Σ_rows dy · x̂,    dbias = Σ_rows dy
///
/// If the norm is not centered (an RMS norm), mean and ⟨g⟩ are 0. Outputs that are undefined are not computed; at least
/// one output is defined. M may be 0; then sums over rows are 0. N is not 0.
struct NormBackward {
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  bool centered;
  const Tensor& dy;                 // (M, N), x's dtype
  const Tensor& x;                  // (M, N): the matrix that was normalized
  const Tensor& weight = kAbsent;   // (N), x's dtype or sums; undefined: 1
  const Tensor& mean = kAbsent;     // (2, M): mean and its rest, or (1, M): mean; sums; undefined if not centered
  const Tensor& rstd;               // (M), sums
  const Tensor& dx = kAbsent;       // out (M, N), x's dtype
  const Tensor& dweight = kAbsent;  // out (N), x's dtype or sums
  const Tensor& dbias = kAbsent;    // out (N), dweight's dtype if both are defined; undefined if not centered
  // Only if x was a sum, residual + dropped(…), that also has a gradient of its own; otherwise undefined:
  const Tensor& dsum = kAbsent;        // (M, N), x's dtype
  ElementDropout dropout = {};         // drops the same elements as mica::dropout
  const Tensor& dx_dropped = kAbsent;  // out (M, N), x's dtype: dx with dropout applied
  const Tensor& dx_bias = kAbsent;     // out (N), x's dtype: the sum over rows of dx_dropped or, without dropout, of dx
};

/// For arguments without dsum and the members after it.
void norm_backward(Cpu, const NormBackward& args);
void norm_backward(Cuda, const NormBackward& args);

/// The same with dsum. There are kernels for CUDA only, and not for every shape. Returns false, and computes nothing,
/// if there is no kernel.
inline bool add_norm_backward(Cpu, const NormBackward&) { return false; }
bool add_norm_backward(Cuda, const NormBackward& args);

/// Whether add_norm_backward() can also compute dx_bias: kernels for longer rows do not have enough registers.
constexpr bool add_norm_sums_dx(DType dtype, std::int64_t columns) { return size_of(dtype) == 2 && columns <= 2048; }

}  // namespace mica::kernels
