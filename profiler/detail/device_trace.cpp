#include <chrono>

#include <mica/profiler/detail/device_trace.h>

namespace mica::cuda {

std::int64_t trace_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

#if !MICA_WITH_CUDA

std::unique_ptr<DeviceTrace> start_device_trace() { return nullptr; }
void nvtx_push(const std::string&) {}
void nvtx_pop() {}

#endif

}  // namespace mica::cuda
