#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/dropout/detail/element_dropout.h>
#include <mica/ops/norm/detail/norm_forward.h>

namespace mica::kernels {

/// The backward of every norm of rows. All tensors are contiguous and on the kernel's device. "sums" is float32, or
/// float64 where x is. With g = dy · weight, x̂ = (x − mean) · rstd and ⟨·⟩ the mean over a row,
///
///   dx = rstd · (g − ⟨g⟩ − x̂ · ⟨g · x̂⟩) + dsum,    dweight = Σ_rows dy · x̂,    dbias = Σ_rows dy
///
/// Not centered, as an RMS norm is, mean and ⟨g⟩ are 0. Whichever output is undefined is not computed; one at least is
/// defined. M may be 0: sums over rows are 0 then. N is not 0.
struct NormBackward {
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  bool centered;
  const Tensor& dy;                 // (M, N), x's dtype
  const Tensor& x;                  // (M, N): what was normalized
  const Tensor& weight = kAbsent;   // (N), x's dtype or sums; undefined: 1
  const Tensor& mean = kAbsent;     // (2, M), or (1, M): mean[1] is 0, sums; undefined if not centered
  const Tensor& rstd;               // (M), sums
  const Tensor& dx = kAbsent;       // out (M, N), x's dtype
  const Tensor& dweight = kAbsent;  // out (N), x's dtype or sums
  const Tensor& dbias = kAbsent;    // out (N), dweight's dtype where both are defined; undefined if not centered
  // Undefined unless x was a sum, residual + dropped(…), with a gradient of its own:
  const Tensor& dsum = kAbsent;        // (M, N), x's dtype
  ElementDropout dropout = {};         // element by element as mica::dropout
  const Tensor& dx_dropped = kAbsent;  // out (M, N), x's dtype: what dropout leaves of dx
  const Tensor& dx_bias = kAbsent;     // out (N), x's dtype: the sum of dx_dropped's rows, or of dx's if nothing drops
};

/// Without dsum, and what follows it.
void norm_backward(Cpu, const NormBackward& args);
void norm_backward(Cuda, const NormBackward& args);

/// With dsum. There are kernels for CUDA only, and not for every shape: they return whether they did it.
inline bool add_norm_backward(Cpu, const NormBackward&) { return false; }
bool add_norm_backward(Cuda, const NormBackward& args);

/// Whether add_norm_backward() adds up dx_bias too, which takes registers that longer rows have not.
constexpr bool add_norm_sums_dx(DType dtype, std::int64_t columns) { return size_of(dtype) == 2 && columns <= 1536; }

}  // namespace mica::kernels
