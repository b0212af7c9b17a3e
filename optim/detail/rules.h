#pragma once

// The steps of the optimizers: see on_part() for what a rule is.

#include <cmath>

#include <mica/optim/detail/step_kernels.h>

namespace mica::kernels {

/// One step by Rule: finishes the norm, counts the step, computes the rules and applies them. On CUDA, nothing is read
/// back to the host. Instantiated for the rules below.
template <template <class> class Rule>
void optimizer_step(Cpu, const OptimizerStep& step);
template <template <class> class Rule>
void optimizer_step(Cuda, const OptimizerStep& step);

/// AdamW for one element; its states are the averages of the gradient and of its square.
template <class A>
struct AdamWRule {
  static constexpr const char* kName = "adamw_step";
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

/// Adam for one element: AdamW without its decay, by a gradient that includes the decay.
template <class A>
struct AdamRule {
  static constexpr const char* kName = "adam_step";
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

/// Lion for one element; its state is the average of the gradient.
template <class A>
struct LionRule {
  static constexpr const char* kName = "lion_step";
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

/// SGD for one element. Its state is the momentum buffer; there is none if momentum is 0.
template <class A>
struct SgdRule {
  static constexpr const char* kName = "sgd_step";
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
