#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>

namespace mica::cuda {

namespace {

thread_local cudaStream_t stream = nullptr;

}  // namespace

void throw_error(cudaError_t status, const char* what, std::source_location where) {
  // Clears the error where it can be cleared, so that the program can go on.
  (void)cudaGetLastError();
  throw CudaError(fmt::format("cuda: {} failed: {} ({}) at {}:{}", what, cudaGetErrorName(status),
                              cudaGetErrorString(status), where.file_name(), where.line()));
}

void check_launch(const char* kernel, std::source_location where) {
  check(cudaGetLastError(), kernel, where);
  static const bool wait = [] {
    const char* value = std::getenv("MICA_CUDA_SYNC");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  if (wait) {
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

void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

bool device_has_clusters() {
  static std::atomic<signed char> known[64];  // by device; 0: not known
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const bool remembered = device < 64;
  if (remembered && known[device] != 0) {
    return known[device] > 0;
  }
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (remembered) {
    known[device] = major >= 9 ? 1 : -1;
  }
  return major >= 9;
}

int multiprocessor_count() {
  static const std::vector<int> counts = [] {
    std::vector<int> result(device_count());
    for (int device = 0; device < device_count(); ++device) {
      check(cudaDeviceGetAttribute(&result[device], cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    }
    return result;
  }();
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return counts.at(device);
}

cudaStream_t current_stream() { return stream; }

StreamGuard::StreamGuard(cudaStream_t next) : previous_(stream) { stream = next; }

StreamGuard::~StreamGuard() { stream = previous_; }

}  // namespace mica::cuda
