#pragma once

// A timeline of the GPU's work, for the profiler. Needs no CUDA header.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mica::cuda {

/// One kernel, copy or fill.
struct DeviceWork {
  std::string name;           // of the kernel, demangled; "memcpy" or "memset"; empty if only the range is known
  std::int64_t start_ns = 0;  // on the clock of trace_clock_ns()
  std::int64_t end_ns = 0;
  std::uint64_t range = 0;   // the innermost range in which it was launched; 0 outside all
  std::uint32_t stream = 0;  // the driver's number
  std::size_t bytes = 0;     // copied or filled
};

/// Records the current device's work until stop(). Only one may exist at a time. It costs host time, no device time.
class DeviceTrace {
 public:
  virtual ~DeviceTrace() = default;
  /// How times are measured: "CUPTI", or "CUDA events", which measure ranges but not kernels.
  virtual const char* source() const = 0;
  /// Work that this thread launches until pop() belongs to `range`, which must not be 0. Ranges nest.
  virtual void push(std::uint64_t range) = 0;
  virtual void pop() = 0;
  /// Waits for the device and returns its work, in order of start. Call it once.
  virtual std::vector<DeviceWork> stop() = 0;
};

/// Uses CUPTI if the library was found at build time and at run time, else events. Null without a GPU. Throws if there
/// already is a trace.
std::unique_ptr<DeviceTrace> start_device_trace();

/// The host clock of traces: steady, in nanoseconds.
std::int64_t trace_clock_ns();

/// Marks a range for NVIDIA's tools (NVTX) until nvtx_pop(); has no effect without them.
void nvtx_push(const std::string& name);
void nvtx_pop();

}  // namespace mica::cuda
