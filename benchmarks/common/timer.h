#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <mica/core/dispatch.h>

namespace benchmarks {

/// Work to be timed; called repeatedly.
using Work = std::function<void()>;

/// The time of each of `repeats` calls of `work` in microseconds, after a warm-up. On the CPU, wall time. On CUDA, the
/// time between two events of the current stream, after a write of 256 MiB that flushes the L2 cache.
std::vector<double> times_us(mica::Cpu, int repeats, const Work& work);
std::vector<double> times_us(mica::Cuda, int repeats, const Work& work);

/// The time per call of `repeats` back-to-back calls of `work` in milliseconds, from the end of one to the end of the
/// next, as in a training loop: no cache flush, and no host synchronization except within `work`.
std::vector<double> step_times_ms(mica::Cpu, int repeats, const Work& work);
std::vector<double> step_times_ms(mica::Cuda, int repeats, const Work& work);

/// Times at which the work queued so far ends: events of the current stream on CUDA, wall time on the CPU.
class Timeline {
 public:
  virtual ~Timeline() = default;
  virtual void mark() = 0;
  /// Waits for the last mark, returns the times of all marks in milliseconds since the first, and clears them.
  virtual std::vector<double> take_ms() = 0;
};
std::unique_ptr<Timeline> timeline(mica::Cpu);
std::unique_ptr<Timeline> timeline(mica::Cuda);

double median(std::vector<double> values);

/// The median of times_us.
double median_us(mica::Device device, int repeats, const Work& work);

/// The host time of one call of `work` in microseconds, without the GPU work that it queues: the median of `repeats`
/// means over `calls` calls, few enough not to fill the GPU's queue.
double host_us(mica::Device device, int repeats, int calls, const Work& work);

}  // namespace benchmarks
