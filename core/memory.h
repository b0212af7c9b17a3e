#pragma once

// Raw memory, one overload a device. Storage owns it; nothing else calls this.

#include <cstddef>

#include <mica/core/dispatch.h>

namespace mica::memory {

/// Uninitialized memory, aligned for the widest loads. Throws OutOfMemory saying how much was asked for.
void* allocate(Cpu, std::size_t bytes, void** stream);
void deallocate(Cpu, void* data, void* stream) noexcept;

/// On the current device, in the order of the current stream, which is returned in *stream and wanted back by
/// deallocate. It comes from the driver's pool, which keeps what is freed; with MICA_CUDA_POOL=0 in the environment it
/// comes from cudaMalloc, so that memory checkers know the bounds of every block. OutOfMemory says how much is free.
void* allocate(Cuda, std::size_t bytes, void** stream);
void deallocate(Cuda, void* data, void* stream) noexcept;

/// Copies bytes between any two devices or the host, in the order of the current stream of the current device. A copy
/// that ends on the host has arrived on return.
void copy(Cuda, void* to, const void* from, std::size_t bytes);

}  // namespace mica::memory
