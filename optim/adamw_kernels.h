#pragma once

#include <cmath>

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// One step of AdamW for one parameter. All tensors are row-major and of one shape; the averages are of the
/// accumulation dtype. correction1 and correction2 are 1 − βᵗ of the two averages.
struct AdamWStep {
  Tensor param;
  Tensor grad;
  Tensor exp_avg;
  Tensor exp_avg_sq;
  double lr, beta1, beta2, eps, weight_decay;
  double correction1, correction2;
};

void adamw_step(Cpu, const AdamWStep& args);
void adamw_step(Cuda, const AdamWStep& args);

/// The step for one element, written once for both devices.
template <class A>
struct AdamWRule {
  A keep, beta1, new1, beta2, new2, step_size, root_scale, eps;

  explicit AdamWRule(const AdamWStep& s)
      : keep(static_cast<A>(1 - s.lr * s.weight_decay)),
        beta1(static_cast<A>(s.beta1)),
        new1(static_cast<A>(1 - s.beta1)),
        beta2(static_cast<A>(s.beta2)),
        new2(static_cast<A>(1 - s.beta2)),
        step_size(static_cast<A>(s.lr / s.correction1)),
        root_scale(static_cast<A>(1 / std::sqrt(s.correction2))),
        eps(static_cast<A>(s.eps)) {}

  MICA_HOST_DEVICE void operator()(A& param, A grad, A& average, A& average_sq) const {
    const A m = beta1 * average + new1 * grad;
    const A v = beta2 * average_sq + new2 * grad * grad;
    average = m;
    average_sq = v;
    param = keep * param - step_size * m / (std::sqrt(v) * root_scale + eps);
  }
};

}  // namespace mica::kernels
