#pragma once

// Raw memory, one overload a device. Storage owns it; nothing else calls this.

#include <cstddef>

#include <mica/core/dispatch.h>

namespace mica::memory {

/// True unless MICA_POOL=0 is in the environment: then freed memory goes straight back to the system, so that memory
/// checkers know the bounds and the life of every block.
bool pooling();

/// True if MICA_POISON=1 is in the environment: then every block is handed out full of 0xFF bytes, which are NaN in
/// each floating dtype and −1 in integers, so that an element read before it is written shows. The tests set it.
bool poisoning();

/// Uninitialized memory, aligned for the widest loads. Throws OutOfMemory saying how much was asked for. Large blocks
/// are kept for reuse when freed.
void* allocate(Cpu, std::size_t bytes, void** stream);
void deallocate(Cpu, void* data, std::size_t bytes, void* stream) noexcept;

/// On the current device, in the order of the current stream; who gets it back is returned in *stream and wanted by
/// deallocate. While a CUDA graph is captured it comes from the graph's arena, else from the driver's stream-ordered
/// pool, which keeps what is freed; small blocks of the default stream are kept here. OutOfMemory says how much is
/// free.
void* allocate(Cuda, std::size_t bytes, void** stream);
void deallocate(Cuda, void* data, std::size_t bytes, void* stream) noexcept;

/// Writes a few kilobytes of the host's memory, as they are now, to the current device in the order of the current
/// stream. They travel as a kernel's arguments: `from` is free on return, nobody waits, and a CUDA graph that captures
/// it writes the same bytes at each replay.
void write(Cpu, void* to, const void* from, std::size_t bytes);
void write(Cuda, void* to, const void* from, std::size_t bytes);

/// Copies bytes from one device to another, in the order of the current stream. One of them is the current GPU: that of
/// `from`, if it is a GPU. A copy from a GPU has arrived on return; one from the host has been read, and does not wait
/// for work before it unless it is large. Throws while a CUDA graph is captured.
void copy(Cuda, void* to, Device to_device, const void* from, Device from_device, std::size_t bytes);

}  // namespace mica::memory
