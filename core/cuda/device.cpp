#include <cstdlib>
#include <cstring>
#include <vector>

#include <mica/core/capture.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/device.h>
#include <mica/core/dispatch.h>

namespace mica {

namespace cuda {

namespace {

thread_local cudaStream_t stream = nullptr;

struct DeviceFacts {
  int compute_capability;  // 80 for 8.0
  int multiprocessors;
};

// Facts about the current device.
const DeviceFacts& device_facts() {
  static const std::vector<DeviceFacts> facts = [] {
    std::vector<DeviceFacts> result;
    for (int device = 0; device < device_count(); ++device) {
      const auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
        return value;
      };
      result.push_back({.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                                              attribute(cudaDevAttrComputeCapabilityMinor),
                        .multiprocessors = attribute(cudaDevAttrMultiProcessorCount)});
    }
    return result;
  }();
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return facts.at(device);
}

}  // namespace

void throw_error(cudaError_t status, const char* what, std::source_location where) {
  // Clears the error if possible, so that the program can continue.
  (void)cudaGetLastError();
  throw CudaError(fmt::format("cuda: {} failed: {} ({}) at {}:{}", what, cudaGetErrorName(status),
                              cudaGetErrorString(status), where.file_name(), where.line()));
}

void check_launch(const char* kernel, std::source_location where) {
  check(cudaGetLastError(), kernel, where);
  LaunchObserver::notify(kernel);
  static const bool wait = [] {
    const char* value = std::getenv("MICA_CUDA_SYNC");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  if (wait && !is_capturing()) {
    check(cudaStreamSynchronize(current_stream()), kernel, where);
  }
}

int device_count() {
  static const int count = [] {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
      (void)cudaGetLastError();
      n = 0;
    }
    return n;
  }();
  return count;
}

int exchange_device(int device) {
  mica::check(device >= 0 && device < device_count(), "there is no device cuda:{}: this machine has {} CUDA device{}",
              device, device_count(), device_count() == 1 ? "" : "s");
  int previous = 0;
  check(cudaGetDevice(&previous), "cudaGetDevice");
  if (previous != device) {
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  return previous;
}

void synchronize() {
  check_not_capturing("synchronize");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

bool device_has_clusters() { return device_facts().compute_capability >= 90; }

bool device_has_wgmma() { return MICA_WITH_SM90A && device_facts().compute_capability == 90; }

int multiprocessor_count() { return device_facts().multiprocessors; }

cudaStream_t current_stream() { return stream; }

StreamGuard::StreamGuard(cudaStream_t next) : previous_(stream) { stream = next; }

StreamGuard::~StreamGuard() { stream = previous_; }

}  // namespace cuda

int cuda_device_count() { return cuda::device_count(); }

std::string device_name(Device device) {
  if (device.is_cpu()) {
    return "cpu";
  }
  const DeviceGuard guard(device);  // throws if there is no such device
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  return properties.name;
}

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

}  // namespace mica
