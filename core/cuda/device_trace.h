#pragma once

// What a GPU did and when, for the profiler. Needs no CUDA header.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mica::cuda {

/// One kernel, copy or fill.
struct DeviceWork {
  std::string name;           // of the kernel, demangled; "memcpy" or "memset"; empty if only the range is known
  std::int64_t start_ns = 0;  // by the clock of trace_clock_ns()
  std::int64_t end_ns = 0;
  std::uint64_t range = 0;   // the innermost one that it was launched in; 0 outside of all
  std::uint32_t stream = 0;  // the driver's number
  std::size_t bytes = 0;     // copied or filled
};

/// Watches the current device until stop(). There is one at a time; what it costs, it costs the host.
class DeviceTrace {
 public:
  virtual ~DeviceTrace() = default;
  /// How times are measured: "CUPTI", or "CUDA events", which know ranges but no kernels.
  virtual const char* source() const = 0;
  /// What this thread launches until pop() belongs to `range`, which is not 0. Ranges nest.
  virtual void push(std::uint64_t range) = 0;
  virtual void pop() = 0;
  /// Waits for the device and returns what it did, in order of start. To be called once.
  virtual std::vector<DeviceWork> stop() = 0;
};

/// By CUPTI if the library was found when mica was built and is found now, else by events. Null where there is no GPU.
/// Throws if there is a trace already.
std::unique_ptr<DeviceTrace> start_device_trace();

/// The clock of the host that traces use: steady, in nanoseconds.
std::int64_t trace_clock_ns();

/// Marks a range for NVIDIA's tools (NVTX), until nvtx_pop(); nothing happens without one of them.
void nvtx_push(const std::string& name);
void nvtx_pop();

}  // namespace mica::cuda
