#include <mica/core/device_info.h>

#if !MICA_WITH_CUDA

namespace mica {

std::string device_name(Device device) {
  check(device.is_cpu(), "mica was built without CUDA, so there is no device {}", device);
  return "cpu";
}

}  // namespace mica

#endif
