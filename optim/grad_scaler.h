#pragma once

#include <mica/core/state_dict.h>
#include <mica/core/tensor.h>

namespace mica::optim {

struct GradScalerOptions {
  double init_scale = 65536;            ///< > 0
  double growth_factor = 2;             ///< > 1
  double backoff_factor = 0.5;          ///< in (0, 1)
  std::int64_t growth_interval = 2000;  ///< steps without overflow until the scale grows; at least 1
};

/// Loss scaling against underflow of float16 gradients: backward starts from the loss times a scale, and the optimizer
/// divides by it. If a gradient overflows, the step is skipped and the scale is reduced; after growth_interval good
/// steps it grows. The scale, the count and the decision are on the device, and no function waits unless stated.
///
///     optim::GradScaler scaler;
///     scaler.scale(loss).backward();
///     optimizer.step({.max_grad_norm = 1.0, .scaler = &scaler});
///     scaler.update();
///
/// bfloat16 has float32's exponents and needs no scaling. Micikevicius et al., Mixed Precision Training, 2018.
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// The loss times the scale, in float32 (float64 for float64). Differentiable. The first loss sets the scale's
  /// device.
  Tensor scale(const Tensor& loss);

  /// Adjusts the scale. Call it once after the step, or after the steps of all optimizers.
  void update();

  /// The current scale, on the host: waits for the device.
  double scale() const;

  /// "scale", float64, and "growth_tracker", int64: the successful steps since the scale changed. Waits for the device.
  StateDict state_dict() const;
  /// Throws one Error that describes any mismatch, without changing anything.
  void load_state_dict(const StateDict& state);

  /// (3) float64: scale, growth_tracker, and 1 if a step was skipped since the last update(). For kernels.
  const Tensor& state() const { return state_; }

 private:
  GradScalerOptions options_;
  Tensor state_;
};

}  // namespace mica::optim
