#pragma once

// Raw memory, one overload per device. Only Storage calls these functions.

#include <cstddef>

#include <mica/core/dispatch.h>

namespace mica::memory {

/// Whether freed memory is cached. False if MICA_POOL=0 is in the environment: it is then returned to the system at
/// once, so that memory checkers know the bounds and the lifetime of every block.
bool pooling();

/// Whether new blocks are filled with 0xFF bytes, which are NaN in each floating dtype and −1 in integers, to reveal
/// reads of uninitialized elements. True if MICA_POISON=1 is in the environment, as in the tests.
bool poisoning();

/// Uninitialized memory, aligned for the widest loads. Throws OutOfMemory with the requested size. Large blocks are
/// cached for reuse when freed.
void* allocate(Cpu, std::size_t bytes, void** stream);
void deallocate(Cpu, void* data, std::size_t bytes, void* stream) noexcept;

/// Allocates on the current device, in the order of the current stream. *stream receives the block's owner; pass it to
/// deallocate. During the capture of a CUDA graph, the memory comes from the graph's arena, otherwise from the driver's
/// stream-ordered pool, which caches freed memory; small blocks of the default stream are cached by mica. OutOfMemory
/// reports the free memory.
void* allocate(Cuda, std::size_t bytes, void** stream);
void deallocate(Cuda, void* data, std::size_t bytes, void* stream) noexcept;

/// Copies a few kilobytes of host memory to the current device in the order of the current stream, as kernel arguments:
/// `from` may be reused on return, the host does not wait, and a CUDA graph that captures the call writes the same
/// bytes at each replay.
void write(Cpu, void* to, const void* from, std::size_t bytes);
void write(Cuda, void* to, const void* from, std::size_t bytes);

/// Copies bytes from one device to another, in the order of the current stream. The GPU of `from` must be current; if
/// `from` is on the host, that of `to`. A copy from a GPU is complete on return. After a copy from the host, the source
/// has been read; only large copies wait for earlier work. Throws while a CUDA graph is captured.
void copy(Cuda, void* to, Device to_device, const void* from, Device from_device, std::size_t bytes);

/// From now on, `f` is called after each copy from a GPU to the host, before the values are used. It may throw if they
/// cannot be right: `distributed` does so when a rank has failed.
void check_copies_by(void (*f)());
/// Calls the function passed to check_copies_by(), if any.
void check_copy();

}  // namespace mica::memory
