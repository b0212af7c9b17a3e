#include <cuda_runtime_api.h>

#include <mica/core/cuda/error.h>
#include <mica/core/device_info.h>

namespace mica {

std::string device_name(Device device) {
  if (device.is_cpu()) {
    return "cpu";
  }
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  return properties.name;
}

}  // namespace mica
