#include <mica/core/device.h>
#include <mica/core/dispatch.h>

#if MICA_WITH_CUDA
#include <mica/core/cuda/device.h>
#endif

namespace mica {

std::string to_string(Device device) { return device.is_cpu() ? "cpu" : fmt::format("cuda:{}", device.index); }

#if MICA_WITH_CUDA

int cuda_device_count() { return cuda::device_count(); }

void synchronize(Device device) {
  if (device.is_cuda()) {
    const DeviceGuard guard(device);
    cuda::synchronize();
  }
}

DeviceGuard::DeviceGuard(Device device) {
  if (device.is_cuda()) {
    const int current = cuda::exchange_device(device.index);
    previous_ = current == device.index ? -1 : current;
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) {
    cuda::exchange_device(previous_);
  }
}

#else

namespace {

void expect_cpu(Device device) {
  check(device.is_cpu(), "mica was built without CUDA, so there is no device {}", device);
}

}  // namespace

int cuda_device_count() { return 0; }
void synchronize(Device device) { expect_cpu(device); }
DeviceGuard::DeviceGuard(Device device) { expect_cpu(device); }
DeviceGuard::~DeviceGuard() = default;

#endif

}  // namespace mica
