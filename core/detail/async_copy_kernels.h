#pragma once

// What core/detail/async_copy.h needs from a device. Streams and events are handles of the CUDA runtime.

#include <cstddef>
#include <memory>
#include <vector>

#include <mica/core/dispatch.h>

namespace mica::memory {

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

/// Page-locked host memory.
std::shared_ptr<std::byte> allocate_pinned(Cuda, std::size_t bytes);

std::shared_ptr<void> make_copy_stream(Cuda);
/// Starts the copies on `stream`, after the current stream's work. Returns an event that marks their end.
std::shared_ptr<void> start_copies(Cuda, void* stream, const std::vector<Copy>& copies);

void wait_for_event(Cuda, void* event);
/// Later work on the current stream waits for the event.
void order_after_event(Cuda, void* event);

}  // namespace mica::memory
