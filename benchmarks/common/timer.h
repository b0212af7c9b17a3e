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

/// The median of the above.
double median_us(mica::Device device, int repeats, const Work& work);

/// Microseconds of the host that one call of `work` takes, without what it queues on a GPU: the median of `repeats`
/// means over `calls`, few enough not to fill a GPU's queue.
double host_us(mica::Device device, int repeats, int calls, const Work& work);

}  // namespace benchmarks
