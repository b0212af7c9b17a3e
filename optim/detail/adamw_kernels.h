#pragma once

#include <cmath>

#include <mica/optim/detail/step_kernels.h>

namespace mica::kernels {

void adamw_step(Cpu, const OptimizerStep& step);
void adamw_step(Cuda, const OptimizerStep& step);

/// AdamW for one element; its states are the averages of the gradient and of its square.
template <class A>
struct AdamWRule {
  static constexpr int kScalars = 5;  // lr, β₁, β₂, eps, weight_decay

  A keep, beta1, new1, beta2, new2, step_size, root_scale, eps;

  /// At step t ≥ 1.
  MICA_HOST_DEVICE static AdamWRule at_step(const double* scalars, std::int64_t t) {
    const double lr = scalars[0];
    const double beta1 = scalars[1];
    const double beta2 = scalars[2];
    const double correction1 = 1 - ::pow(beta1, static_cast<double>(t));
    const double correction2 = 1 - ::pow(beta2, static_cast<double>(t));
    return {.keep = 1 - lr * scalars[4],
            .beta1 = beta1,
            .new1 = 1 - beta1,
            .beta2 = beta2,
            .new2 = 1 - beta2,
            .step_size = lr / correction1,
            .root_scale = 1 / ::sqrt(correction2),
            .eps = scalars[3]};
  }

  template <class B>
  MICA_HOST_DEVICE static AdamWRule rounded(const AdamWRule<B>& r) {
    return {.keep = static_cast<A>(r.keep),
            .beta1 = static_cast<A>(r.beta1),
            .new1 = static_cast<A>(r.new1),
            .beta2 = static_cast<A>(r.beta2),
            .new2 = static_cast<A>(r.new2),
            .step_size = static_cast<A>(r.step_size),
            .root_scale = static_cast<A>(r.root_scale),
            .eps = static_cast<A>(r.eps)};
  }

  MICA_HOST_DEVICE void operator()(A& param, A grad, A& average, A& average_sq) const {
    const A m = beta1 * average + new1 * grad;
    const A v = beta2 * average_sq + new2 * grad * grad;
    average = m;
    average_sq = v;
    param = keep * param - step_size * m / (std::sqrt(v) * root_scale + eps);
  }
};

}  // namespace mica::kernels
