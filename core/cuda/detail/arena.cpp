#include <algorithm>
#include <atomic>
#include <iterator>

#include <mica/core/cuda/detail/arena.h>
#include <mica/core/cuda/stream.h>

namespace mica::cuda {

namespace {

constexpr std::size_t kStep = 512;  // at least cudaMalloc's alignment
constexpr std::size_t kSegmentStep = std::size_t{2} << 20;
// Smaller requests share segments of this size.
constexpr std::size_t kSharedSegment = std::size_t{32} << 20;

constexpr std::size_t rounded_up(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

thread_local constinit Arena* arena = nullptr;
thread_local constinit cudaStream_t arena_stream = nullptr;

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

Arena::Arena(int device) : device_(device), id_(next_id()) {}

void* Arena::allocate(std::size_t bytes) {
  bytes = rounded_up(std::max<std::size_t>(bytes, 1), kStep);
  const std::lock_guard lock(mutex_);
  // The smallest block that fits, at the lowest address: capturing the same calls gives the same layout.
  auto found = free_.lower_bound({bytes, nullptr});
  if (found == free_.end()) {
    if (!add_segment(bytes)) {
      return nullptr;
    }
    found = free_.lower_bound({bytes, nullptr});
  }
  const auto block = blocks_.find(found->second);
  free_.erase(found);
  block->second.free = false;
  if (const std::size_t rest = block->second.bytes - bytes; rest > 0) {
    const auto tail = blocks_.try_emplace(block->first + bytes, Block{rest, 0, true}).first;
    free_.emplace(rest, tail->first);
    block->second.bytes = bytes;
  }
  ++used_;
  return block->first;
}

bool Arena::add_segment(std::size_t bytes) {
  for (const std::size_t size :
       {std::max(kSharedSegment, rounded_up(bytes, kSegmentStep)), rounded_up(bytes, kSegmentStep)}) {
    void* data = nullptr;
    if (cudaMalloc(&data, size) == cudaSuccess) {
      auto* const start = static_cast<std::byte*>(data);
      blocks_.try_emplace(start, Block{size, size, true});
      free_.emplace(size, start);
      reserved_ += size;
      return true;
    }
    (void)cudaGetLastError();
  }
  return false;
}

void Arena::deallocate(void* data) noexcept {
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    make_free(blocks_.find(static_cast<std::byte*>(data)));
    --used_;
    if (abandoned_) {
      release_segments();
      last = used_ == 0;
    }
  }
  if (last) {
    delete this;
  }
}

void Arena::make_free(Blocks::iterator block) {
  block->second.free = true;
  if (const auto next = std::next(block);
      next != blocks_.end() && next->second.free && next->second.segment_bytes == 0) {
    free_.erase({next->second.bytes, next->first});
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (block->second.segment_bytes == 0) {
    if (const auto before = std::prev(block); before->second.free) {
      free_.erase({before->second.bytes, before->first});
      before->second.bytes += block->second.bytes;
      blocks_.erase(block);
      block = before;
    }
  }
  free_.emplace(block->second.bytes, block->first);
}

void Arena::release_segments() noexcept {
  int previous = 0;
  const bool alive = cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(device_) == cudaSuccess;
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    if (block->second.free && block->second.segment_bytes == block->second.bytes) {
      // cudaFree waits for the device. At program exit the driver may already be unloaded, and the memory freed.
      if (alive) {
        (void)cudaFree(block->first);
      }
      reserved_ -= block->second.bytes;
      free_.erase({block->second.bytes, block->first});
      block = blocks_.erase(block);
    } else {
      ++block;
    }
  }
  if (alive) {
    (void)cudaSetDevice(previous);
  }
}

void Arena::abandon() noexcept {
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
    release_segments();
    last = used_ == 0;
  }
  if (last) {
    delete this;
  }
}

std::size_t Arena::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

ArenaGuard::ArenaGuard(Arena& guarded, cudaStream_t stream) {
  arena = &guarded;
  arena_stream = stream;
}

ArenaGuard::~ArenaGuard() { arena = nullptr; }

Arena* current_arena() { return arena != nullptr && current_stream() == arena_stream ? arena : nullptr; }

}  // namespace mica::cuda
