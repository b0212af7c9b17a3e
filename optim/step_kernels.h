#pragma once

// What the steps of all optimizers have in common.

#include <concepts>

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/optim/multi_tensor.h>

namespace mica::kernels {

/// One step for many parameters of one device.
struct OptimizerStep {
  const MultiTensorList& list;
  Tensor steps;    // (slots) int64: the steps that each parameter has made; those in the list make one more
  Tensor scalars;  // (groups, Rule::kScalars) float64: the groups' options, as Rule::at_step reads them
  Tensor control;  // a StepControl; undefined for factor 1 and no skip
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
