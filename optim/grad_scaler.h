#pragma once

#include <mica/core/tensor.h>
#include <mica/nn/state_dict.h>

namespace mica::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;             ///< > 1
  double backoff_factor = 0.5;          ///< in (0, 1)
  std::int64_t growth_interval = 2000;  ///< steps without overflow until the scale grows
};

/// Keeps gradients of float16 away from underflow: backward starts from the loss times a scale, and the optimizer
/// divides by it. When a gradient has overflowed, the step is skipped and the scale shrinks; after growth_interval good
/// steps it grows. The scale, the count and the decision lie on the device, and nothing here waits for it.
///
///     optim::GradScaler scaler;
///     scaler.scale(loss).backward();
///     optimizer.step({.max_grad_norm = 1.0, .scaler = &scaler});
///     scaler.update();
///
/// bfloat16 has the exponents of float32 and needs none of this. Micikevicius et al., Mixed Precision Training, 2018.
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// The loss times the scale, in float32 (float64 for float64). Differentiable. The first loss decides on which device
  /// the scale lies.
  Tensor scale(const Tensor& loss);

  /// To be called once after the step, or after the steps of all optimizers: takes over whether one was skipped.
  void update();

  /// The current scale, on the host: waits for the device.
  double scale() const;

  /// "scale", float64, and "growth_tracker", int64: the good steps since the scale changed. Waits for the device.
  StateDict state_dict() const;
  /// Throws one Error that says what does not fit, and then changes nothing.
  void load_state_dict(const StateDict& state);

  /// (3) float64: scale, growth_tracker, and 1 if a step was skipped since the last update(). For kernels.
  const Tensor& state() const { return state_; }

 private:
  GradScalerOptions options_;
  Tensor state_;
};

}  // namespace mica::optim
