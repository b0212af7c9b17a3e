#include <cuda_runtime_api.h>

#include <mica/core/cuda/error.h>
#include <mica/core/device_info.h>
#include <mica/core/dispatch.h>

namespace mica {

std::string device_name(Device device) {
  if (device.is_cpu()) {
    return "cpu";
  }
  const DeviceGuard guard(device);  // throws if there is no such device
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  return properties.name;
}

}  // namespace mica
