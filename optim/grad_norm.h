#pragma once

#include <vector>

#include <mica/core/tensor.h>
#include <mica/optim/multi_tensor.h>

namespace mica::optim {

/// Gradients of one device, and what their norm decides there.
struct DeviceGradients {
  Device device;
  kernels::MultiTensorList list{};
  Tensor control{};  // a kernels::StepControl, made by grad_norm
};

/// The norm of all gradients of all devices, clipped to `max_norm`, and each device's control. `scaler` is the state of
/// a GradScaler, or undefined: see kernels::GradNorm. Returns a float64 scalar on the first device. With several
/// devices the host waits for them.
Tensor grad_norm(const std::vector<DeviceGradients*>& works, double max_norm, const Tensor& scaler = {});

}  // namespace mica::optim
