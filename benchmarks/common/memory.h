#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>

namespace benchmarks {

/// The most bytes that tensors have held on the device since the last reset. Workspaces that libraries allocate for
/// themselves do not count. Not measured on the CPU: 0.
void reset_peak_memory(mica::Cpu);
void reset_peak_memory(mica::Cuda);
std::uint64_t peak_memory(mica::Cpu);
std::uint64_t peak_memory(mica::Cuda);

}  // namespace benchmarks
