#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// One step of SGD for one parameter. All tensors are row-major and of one shape; the buffer is of the accumulation
/// dtype, and undefined without momentum. `gain` is what the gradient counts in the buffer.
struct SgdStep {
  Tensor param;
  Tensor grad;
  Tensor momentum_buffer;
  double lr, momentum, gain, weight_decay;
  bool nesterov;
};

void sgd_step(Cpu, const SgdStep& args);
void sgd_step(Cuda, const SgdStep& args);

/// The step for one element, written once for both devices.
template <class A>
struct SgdRule {
  A lr, momentum, gain, weight_decay;
  A from_grad, from_buffer;  // the direction as a sum of the two

  explicit SgdRule(const SgdStep& s)
      : lr(static_cast<A>(s.lr)),
        momentum(static_cast<A>(s.momentum)),
        gain(static_cast<A>(s.gain)),
        weight_decay(static_cast<A>(s.weight_decay)),
        from_grad(static_cast<A>(s.nesterov ? 1 : 0)),
        from_buffer(static_cast<A>(s.nesterov ? s.momentum : 1)) {}

  MICA_HOST_DEVICE void operator()(A& param, A grad) const { param -= lr * (grad + weight_decay * param); }

  MICA_HOST_DEVICE void operator()(A& param, A grad, A& buffer) const {
    const A decayed = grad + weight_decay * param;
    const A b = momentum * buffer + gain * decayed;
    buffer = b;
    param -= lr * (from_grad * decayed + from_buffer * b);
  }
};

}  // namespace mica::kernels
