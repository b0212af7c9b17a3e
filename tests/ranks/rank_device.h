#pragma once

#include <mica/core/device.h>
#include <mica/core/tensor.h>

namespace mica::dist {

/// Where the tests' tensors are: the CPU, or this rank's GPU.
inline Device& rank_device() {
  static Device device;
  return device;
}

inline Tensor here(const Tensor& x) { return x.to(rank_device()); }

}  // namespace mica::dist
