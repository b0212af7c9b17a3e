#pragma once

#include <vector>

#include <mica/core/tensor.h>
#include <mica/optim/detail/step_kernels.h>

namespace mica::optim {

/// Gradients of one device, and their norm there.
struct DeviceGradients {
  Device device;
  kernels::MultiTensorList list{};
  kernels::GradNorm norm{};
};

/// Sums the squares of all gradients and gives each device the arguments to finish the norm: see kernels::GradNorm.
/// `scaler` is the state of a GradScaler, or undefined. If there are several devices, the host waits for them.
void start_norm(const std::vector<DeviceGradients*>& works, double max_norm, const Tensor& scaler = {});

}  // namespace mica::optim
