#pragma once

#include <mica/core/device.h>
#include <mica/core/tensor.h>

namespace mica::distributed {

/// The device of the tests' tensors: the CPU, or this rank's GPU.
inline Device& rank_device() {
  static Device device;
  return device;
}

inline Tensor here(const Tensor& x) { return x.to(rank_device()); }

}  // namespace mica::distributed
