#pragma once

#include <functional>
#include <vector>

#include <mica/core/dispatch.h>

namespace benchmarks {

/// Work to be timed; called again and again.
using Work = std::function<void()>;

/// Microseconds that each of `repeats` calls of `work` took, after some that are not counted. On the CPU, wall time. On
/// CUDA, between two events of the current stream, each after a write of 256 MiB that empties the L2 cache.
std::vector<double> times_us(mica::Cpu, int repeats, const Work& work);
std::vector<double> times_us(mica::Cuda, int repeats, const Work& work);

/// Milliseconds from the end of each of `repeats` calls of `work` to the end of the next, one right after the other, as
/// in a training loop: nothing is flushed, and the host waits for nothing but what `work` waits for.
std::vector<double> step_times_ms(mica::Cpu, int repeats, const Work& work);
std::vector<double> step_times_ms(mica::Cuda, int repeats, const Work& work);

double median(std::vector<double> values);

/// The median of times_us.
double median_us(mica::Device device, int repeats, const Work& work);

/// Microseconds of the host that one call of `work` takes, without what it queues on a GPU: the median of `repeats`
/// means over `calls`, few enough not to fill a GPU's queue.
double host_us(mica::Device device, int repeats, int calls, const Work& work);

}  // namespace benchmarks
