#pragma once

#include <mica/optim/detail/adamw_kernels.h>

namespace mica::kernels {

void adam_step(Cpu, const OptimizerStep& step);
void adam_step(Cuda, const OptimizerStep& step);

/// Adam for one element: AdamW without its decay, by a gradient that includes the decay.
template <class A>
struct AdamRule {
  static constexpr int kScalars = 5;  // lr, β₁, β₂, eps, weight_decay

  AdamWRule<A> step;
  A weight_decay;

  /// At step t ≥ 1.
  MICA_HOST_DEVICE static AdamRule at_step(const double* scalars, std::int64_t t) {
    const double without_decay[] = {scalars[0], scalars[1], scalars[2], scalars[3], 0};
    return {.step = AdamWRule<A>::at_step(without_decay, t), .weight_decay = scalars[4]};
  }

  template <class B>
  MICA_HOST_DEVICE static AdamRule rounded(const AdamRule<B>& r) {
    return {.step = AdamWRule<A>::rounded(r.step), .weight_decay = static_cast<A>(r.weight_decay)};
  }

  MICA_HOST_DEVICE void operator()(A& param, A grad, A& average, A& average_sq) const {
    step(param, grad + weight_decay * param, average, average_sq);
  }
};

}  // namespace mica::kernels
