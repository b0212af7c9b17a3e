#pragma once

#include <cstddef>

#include <mica/core/device.h>

namespace mica {

/// Memory held by tensors on one device, in bytes.
struct MemoryStats {
  std::size_t allocated = 0;  // now
  std::size_t peak = 0;       // maximum since the program start or reset_peak_memory()
  std::size_t workspace = 0;  // the part of `allocated` that cuBLAS uses for itself
};

/// Counts tensor elements and workspaces, but not memory cached for reuse, which depends on the allocator. The
/// memory of a CUDA graph is counted during its capture.
MemoryStats memory_stats(Device device);

/// Resets the peak to the current allocation.
void reset_peak_memory(Device device);

namespace detail {
void count_allocated(Device device, std::size_t bytes);
void count_freed(Device device, std::size_t bytes) noexcept;
/// Counts `bytes` of the allocated memory as workspace; negative: they are no longer a workspace.
void count_workspace(Device device, std::ptrdiff_t bytes) noexcept;
}  // namespace detail

}  // namespace mica
