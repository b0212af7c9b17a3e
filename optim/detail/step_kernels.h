#pragma once

// Declarations shared by the steps of all optimizers.

#include <concepts>

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/optim/detail/multi_tensor.h>

namespace mica::kernels {

/// The norm of all gradients and the resulting StepControl. With a loss scale s (1 without one):
///
///     norm   = (Σ sums)^½ / s
///     factor = min(1, max_norm / (norm + 1e-6)) / s
///     skip   = there is a loss scale, and the norm is not finite
///
/// A norm of NaN makes the factor NaN.
struct GradNorm {
  Tensor sums;      // (n) float64
  double max_norm;  // infinity for none
  Tensor scaler;    // GradScaler::state(), (3) float64: reads [0], the scale; sets [2] to 1 if skip. May be undefined
  Tensor norm;      // () float64, out
  Tensor control;   // a StepControl, out
};

/// One step for many parameters of one device.
struct OptimizerStep {
  const MultiTensorList& list;
  Tensor steps;    // (parameters) int64: step count of each parameter; those in the list are incremented
  Tensor scalars;  // (groups, Rule::kScalars) float64: the groups' options, as Rule::at_step reads them
  GradNorm norm;   // finished first; the step obeys its control. Without tensors: factor 1, no skip
};

/// Calls f.operator()<T, kMaster, kStates>() for a part's dtype, kind and number of states, which must be one that
/// Rule<A> can be called with.
///
/// A rule is the step of one optimizer for one element, written once for both devices: rule(param, grad, states...).
/// Rule<double>::at_step(scalars, step) computes its constants, which Rule<A> rounds.
template <template <class> class Rule, class F>
void on_part(const char* name, const MultiTensorPart& part, F&& f) {
  on_dtype(FloatTypes{}, part.dtype, name, [&]<class T>() {
    using A = Accumulate<T>;
    const auto on_states = [&]<bool kMaster>() {
      if constexpr (std::invocable<const Rule<A>&, A&, A>) {
        if (part.states == 0) {
          return f.template operator()<T, kMaster, 0>();
        }
      }
      if constexpr (std::invocable<const Rule<A>&, A&, A, A&>) {
        if (part.states == 1) {
          return f.template operator()<T, kMaster, 1>();
        }
      }
      if constexpr (std::invocable<const Rule<A>&, A&, A, A&, A&>) {
        if (part.states == 2) {
          return f.template operator()<T, kMaster, 2>();
        }
      }
      fail("{}: has no rule for {} states", name, part.states);
    };
    if constexpr (!std::same_as<T, A>) {
      if (part.master) {
        return on_states.template operator()<true>();
      }
    }
    on_states.template operator()<false>();
  });
}

}  // namespace mica::kernels
