#pragma once

#include <cmath>

#include <mica/optim/detail/step_kernels.h>

namespace mica::kernels {

/// sums[c] = Σ g² over chunk c of the list's gradients, in float64 and in an order that depends on the size of the
/// chunk alone. sums: (chunks) float64.
void sums_of_squares(Cpu, const MultiTensorList& list, const Tensor& sums);
void sums_of_squares(Cuda, const MultiTensorList& list, const Tensor& sums);

/// Finishes the norm.
void grad_norm(Cpu, const GradNorm& args);
void grad_norm(Cuda, const GradNorm& args);

/// g ← control.factor · g, for all gradients of the list; no effect if the factor is 1.
void scale_gradients(Cpu, const MultiTensorList& list, const Tensor& control);
void scale_gradients(Cuda, const MultiTensorList& list, const Tensor& control);

/// GradNorm from the sum of squares, for both devices.
MICA_HOST_DEVICE inline void finish_grad_norm(double sum, double max_norm, double* scaler, double* norm,
                                              StepControl* control) {
  const double scale = scaler != nullptr ? *scaler : 1;
  const double unscaled = ::sqrt(sum) / scale;
  const double clip = max_norm / (unscaled + 1e-6);
  const bool is_finite = unscaled - unscaled == 0;
  const bool skip = scaler != nullptr && !is_finite;
  *norm = unscaled;
  control->factor = (clip >= 1 ? 1 : clip) / scale;
  control->skip = skip ? 1 : 0;
  if (skip) {
    scaler[2] = 1;
  }
}

/// Gradient scaling as a rule: the list's parameters are the gradients themselves.
template <class A>
struct ScaledGradient {
  static constexpr bool kOnlyScales = true;  // a factor of 1 changes nothing

  MICA_HOST_DEVICE void operator()(A& value, A scaled) const { value = scaled; }
};

}  // namespace mica::kernels
