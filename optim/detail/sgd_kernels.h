#pragma once

#include <mica/optim/detail/step_kernels.h>

namespace mica::kernels {

void sgd_step(Cpu, const OptimizerStep& step);
void sgd_step(Cuda, const OptimizerStep& step);

/// SGD for one element. Its state is the momentum buffer; there is none if momentum is 0.
template <class A>
struct SgdRule {
  static constexpr int kScalars = 5;  // lr, momentum, dampening, weight_decay, nesterov (0 or 1)

  A lr, momentum, weight_decay;
  A gain;                    // factor of the gradient in the buffer
  A from_grad, from_buffer;  // coefficients of the two in the update direction

  /// At step t ≥ 1.
  MICA_HOST_DEVICE static SgdRule at_step(const double* scalars, std::int64_t t) {
    const double momentum = scalars[1];
    const bool nesterov = scalars[4] != 0;
    return {.lr = scalars[0],
            .momentum = momentum,
            .weight_decay = scalars[3],
            .gain = t == 1 ? 1 : 1 - scalars[2],
            .from_grad = nesterov ? 1.0 : 0.0,
            .from_buffer = nesterov ? momentum : 1.0};
  }

  template <class B>
  MICA_HOST_DEVICE static SgdRule rounded(const SgdRule<B>& r) {
    return {.lr = static_cast<A>(r.lr),
            .momentum = static_cast<A>(r.momentum),
            .weight_decay = static_cast<A>(r.weight_decay),
            .gain = static_cast<A>(r.gain),
            .from_grad = static_cast<A>(r.from_grad),
            .from_buffer = static_cast<A>(r.from_buffer)};
  }

  MICA_HOST_DEVICE void operator()(A& param, A grad) const { param -= lr * (grad + weight_decay * param); }

  MICA_HOST_DEVICE void operator()(A& param, A grad, A& buffer) const {
    const A decayed = grad + weight_decay * param;
    const A b = momentum * buffer + gain * decayed;
    buffer = b;
    param -= lr * (from_grad * decayed + from_buffer * b);
  }
};

}  // namespace mica::kernels
