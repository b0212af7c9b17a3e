#pragma once

#include <mica/optim/detail/step_kernels.h>

namespace mica::kernels {

void lion_step(Cpu, const OptimizerStep& step);
void lion_step(Cuda, const OptimizerStep& step);

/// Lion for one element; its state is the average of the gradient.
template <class A>
struct LionRule {
  static constexpr int kScalars = 4;  // lr, β₁, β₂, weight_decay

  A lr, keep, beta1, new1, beta2, new2;

  MICA_HOST_DEVICE static LionRule at_step(const double* scalars, std::int64_t) {
    const double lr = scalars[0];
    return {.lr = lr,
            .keep = 1 - lr * scalars[3],
            .beta1 = scalars[1],
            .new1 = 1 - scalars[1],
            .beta2 = scalars[2],
            .new2 = 1 - scalars[2]};
  }

  template <class B>
  MICA_HOST_DEVICE static LionRule rounded(const LionRule<B>& r) {
    return {.lr = static_cast<A>(r.lr),
            .keep = static_cast<A>(r.keep),
            .beta1 = static_cast<A>(r.beta1),
            .new1 = static_cast<A>(r.new1),
            .beta2 = static_cast<A>(r.beta2),
            .new2 = static_cast<A>(r.new2)};
  }

  MICA_HOST_DEVICE void operator()(A& param, A grad, A& average) const {
    const A direction = beta1 * average + new1 * grad;
    average = beta2 * average + new2 * grad;
    // The sign; 0 and NaN stay what they are.
    const A sign = direction > 0 ? A{1} : direction < 0 ? A{-1} : direction;
    param = keep * param - lr * sign;
  }
};

}  // namespace mica::kernels
