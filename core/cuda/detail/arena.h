#pragma once

// The memory of a captured CUDA graph.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

namespace mica::cuda {

/// Blocks for the tensors allocated while a graph is captured. A replay writes to the addresses of the capture, so
/// nothing else may use them: they come from separate segments and, once freed, are reused only by this arena. Reuse is
/// safe immediately, since all work of the capture is in one order.
///
/// Exists until abandon() was called and the last block was freed.
class Arena {
 public:
  explicit Arena(int device);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Null if out of memory. Allocates on the arena's device, which must be current.
  void* allocate(std::size_t bytes);
  void deallocate(void* data) noexcept;

  /// The graph was destroyed: frees each segment once its blocks are unused, and finally the arena itself.
  void abandon() noexcept;

  /// A number unique among all arenas of the program.
  std::uint64_t id() const { return id_; }
  /// The total size of all segments.
  std::size_t reserved() const;

 private:
  struct Block {
    std::size_t bytes;
    std::size_t segment_bytes;  // size of the segment, in its first block; else 0
    bool free;
  };
  using Blocks = std::map<std::byte*, Block>;  // adjacent blocks in address order; segments never merge

  ~Arena() = default;
  bool add_segment(std::size_t bytes);
  void make_free(Blocks::iterator block);
  void release_segments() noexcept;

  const int device_;
  const std::uint64_t id_;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::set<std::pair<std::size_t, std::byte*>> free_;  // by size
  std::size_t used_ = 0;                               // blocks
  std::size_t reserved_ = 0;                           // bytes
  bool abandoned_ = false;
};

/// Until the end of scope, this thread's allocations on `stream` come from the arena.
class ArenaGuard {
 public:
  ArenaGuard(Arena& arena, cudaStream_t stream);
  ~ArenaGuard();
  ArenaGuard(const ArenaGuard&) = delete;
  ArenaGuard& operator=(const ArenaGuard&) = delete;
};

/// The arena of the current stream's allocations; null outside captures.
Arena* current_arena();

/// Waits for the current device and returns mica's cached free memory to it.
void release_cached_memory();

}  // namespace mica::cuda
