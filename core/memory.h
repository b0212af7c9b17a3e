#pragma once

// Raw memory, one overload per device. Only Storage calls these functions.

#include <cstddef>

#include <mica/core/dispatch.h>

namespace mica::memory {

/// True unless MICA_POOL=0 is in the environment: then freed memory is returned to the system immediately, so that
/// memory checkers know the bounds and the lifetime of every block.
bool pooling();

/// True if MICA_POISON=1 is in the environment: then every new block is filled with 0xFF bytes, which are NaN in each
/// floating dtype and −1 in integers, to reveal reads of uninitialized elements. The tests set it.
bool poisoning();

/// Uninitialized memory, aligned for the widest loads. Throws OutOfMemory with the requested size. Large blocks are
/// cached for reuse when freed.
void* allocate(Cpu, std::size_t bytes, void** stream);
void deallocate(Cpu, void* data, std::size_t bytes, void* stream) noexcept;

/// On the current device, in the order of the current stream. *stream receives the block's owner, to be passed to
/// deallocate. During the capture of a CUDA graph, the memory comes from the graph's arena, else from the driver's
/// stream-ordered pool, which caches freed memory; small blocks of the default stream are cached by mica. OutOfMemory
/// reports the free memory.
void* allocate(Cuda, std::size_t bytes, void** stream);
void deallocate(Cuda, void* data, std::size_t bytes, void* stream) noexcept;

/// Copies a few kilobytes of host memory to the current device in the order of the current stream. They are passed as
/// kernel arguments: `from` may be reused on return, the host does not wait, and a CUDA graph that captures the call
/// writes the same bytes at each replay.
void write(Cpu, void* to, const void* from, std::size_t bytes);
void write(Cuda, void* to, const void* from, std::size_t bytes);

/// Copies bytes from one device to another, in the order of the current stream. One of them is the current GPU: that of
/// `from`, if it is a GPU. A copy from a GPU is complete on return. For a copy from the host, the source has been read
/// on return; only large ones wait for earlier work. Throws while a CUDA graph is captured.
void copy(Cuda, void* to, Device to_device, const void* from, Device from_device, std::size_t bytes);

/// From now on, `f` is called whenever a copy from a GPU to the host has ended, before its values are used. It may
/// throw, if they cannot be right: dist does when a rank has failed.
void check_copies_by(void (*f)());
/// Calls it.
void check_copy();

}  // namespace mica::memory
