#pragma once

#include <cstddef>

#include <mica/core/device.h>

namespace mica {

/// What tensors hold on one device, in bytes.
struct MemoryStats {
  std::size_t allocated = 0;  // now
  std::size_t peak = 0;       // at most, since the program began or reset_peak_memory()
};

/// Counts the elements of tensors (and what libraries were given to work in), not what is kept for reuse, which
/// differs with the allocator. What a captured CUDA graph needs counts while it is captured.
MemoryStats memory_stats(Device device);

/// Starts to measure the peak anew, from what is allocated now.
void reset_peak_memory(Device device);

namespace detail {
void count_allocated(Device device, std::size_t bytes);
void count_freed(Device device, std::size_t bytes) noexcept;
}  // namespace detail

}  // namespace mica
