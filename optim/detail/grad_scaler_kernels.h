#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/half.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// GradScaler::update(): see optim/grad_scaler.h.
struct GradScalerUpdate {
  Tensor state;
  double growth_factor, backoff_factor;
  double growth_interval;
};

/// The update itself, for both devices. The scale remains a finite float32.
MICA_HOST_DEVICE inline void update_grad_scale(double* state, double growth_factor, double backoff_factor,
                                               double growth_interval) {
  constexpr double kLargest = 0x1p127;
  constexpr double kMin = 0x1p-126;
  double& scale = state[0];
  double& good_steps = state[1];
  if (state[2] != 0) {
    const double smaller = scale * backoff_factor;
    scale = smaller < kMin ? kMin : smaller;
    good_steps = 0;
  } else if (++good_steps >= growth_interval) {
    const double larger = scale * growth_factor;
    scale = larger > kLargest ? scale : larger;
    good_steps = 0;
  }
  state[2] = 0;
}

inline void grad_scaler_update(Cpu, const GradScalerUpdate& args) {
  update_grad_scale(args.state.data<double>(), args.growth_factor, args.backoff_factor, args.growth_interval);
}
void grad_scaler_update(Cuda, const GradScalerUpdate& args);

}  // namespace mica::kernels
