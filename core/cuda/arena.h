#pragma once

// The memory of a captured CUDA graph.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

namespace mica::cuda {

/// Blocks for the tensors that are made while a graph is captured. A replay writes to the addresses of the capture, so
/// nobody else may get them: they come from segments of their own and, once freed, are handed out again only here. That
/// is safe at once, as all work of the capture is in one order.
///
/// It lives until abandon() was called and the last block was freed.
class Arena {
 public:
  explicit Arena(int device);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Null if there is too little memory. On the arena's device, which is current.
  void* allocate(std::size_t bytes);
  void deallocate(void* data) noexcept;

  /// The graph is gone: gives back every segment as soon as none of its blocks is in use, and then goes itself.
  void abandon() noexcept;

  /// A number that no other arena has or had.
  std::uint64_t id() const { return id_; }
  /// Of all segments.
  std::size_t reserved() const;

 private:
  struct Block {
    std::size_t bytes;
    std::size_t segment_bytes;  // where a segment begins, its size; else 0
    bool free;
  };
  using Blocks = std::map<std::byte*, Block>;  // neighbors in address order; segments never join

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

/// While it lives, what this thread allocates on `stream` comes from the arena.
class ArenaGuard {
 public:
  ArenaGuard(Arena& arena, cudaStream_t stream);
  ~ArenaGuard();
  ArenaGuard(const ArenaGuard&) = delete;
  ArenaGuard& operator=(const ArenaGuard&) = delete;
};

/// The arena that allocations on the current stream come from; null outside of captures.
Arena* current_arena();

/// Waits for the current device and gives freed memory that mica keeps for reuse back to it.
void release_kept_memory();

}  // namespace mica::cuda
