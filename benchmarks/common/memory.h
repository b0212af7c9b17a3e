#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>

namespace benchmarks {

/// The peak of tensor memory on the device since the last reset, in bytes. Workspaces allocated by libraries are not
/// counted. Not measured on the CPU: 0.
void reset_peak_memory(mica::Cpu);
void reset_peak_memory(mica::Cuda);
std::uint64_t peak_memory(mica::Cpu);
std::uint64_t peak_memory(mica::Cuda);

}  // namespace benchmarks
