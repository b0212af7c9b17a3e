#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <mica/core/detail/allocation_fault.h>
#include <mica/core/detail/memory.h>

namespace mica::memory {

namespace {

// A cache line, and the width of the widest vector register.
constexpr std::size_t kAlignment = 64;

// malloc returns large blocks to the system, and touching new pages costs more than most ops. So freed blocks of at
// least this size are kept for reuse, up to kMaxKept bytes.
constexpr std::size_t kMinPooled = std::size_t{64} << 10;
constexpr std::size_t kMaxKept = std::size_t{2} << 30;

// For blocks of at least this size, we request pages of 2 MiB. Reading large weights then takes three quarters of the
// time: there are fewer TLB misses, and fewer page boundaries, at which the prefetcher stops.
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMinHuge = kHugePage;

void* system_allocate(std::size_t bytes) {
  const std::size_t alignment = bytes < kMinHuge ? kAlignment : kHugePage;
  void* const data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
#if defined(MADV_HUGEPAGE)
  if (data != nullptr && bytes >= kMinHuge) {
    // Only a hint: if it fails, the block has small pages.
    static_cast<void>(::madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE));
  }
#endif
  return data;
}

// malloc caches small blocks per thread, aligned_alloc does not. So this function aligns a block from malloc, and
// stores the start of the block right before the data.
void* small_allocate(std::size_t bytes) {
  std::size_t room = kAlignment + bytes;
  void* const block = std::malloc(sizeof(void*) + room);
  if (block == nullptr) {
    return nullptr;
  }
  void* data = static_cast<std::byte*>(block) + sizeof(void*);
  std::align(kAlignment, bytes, data, room);
  std::memcpy(static_cast<std::byte*>(data) - sizeof(void*), &block, sizeof(void*));
  return data;
}

void small_deallocate(void* data) {
  void* block = nullptr;
  std::memcpy(&block, static_cast<std::byte*>(data) - sizeof(void*), sizeof(void*));
  std::free(block);
}

/// Free blocks by size. Sizes are rounded up to eighths of a power of two, so that a block fits many requests and at
/// most an eighth of it is wasted.
class Pool {
 public:
  static std::size_t rounded(std::size_t bytes) {
    const std::size_t step = std::bit_floor(bytes) / 8;
    return (bytes + step - 1) / step * step;
  }

  void* allocate(std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    {
      const std::lock_guard lock(mutex_);
      std::vector<void*>& blocks = free_[size];
      if (!blocks.empty()) {
        void* const data = blocks.back();
        blocks.pop_back();
        kept_ -= size;
        return data;
      }
    }
    void* data = system_allocate(size);
    if (data == nullptr) {
      release_all();
      data = system_allocate(size);
    }
    return data;
  }

  void deallocate(void* data, std::size_t bytes) noexcept {
    const std::size_t size = rounded(bytes);
    const std::lock_guard lock(mutex_);
    if (kept_ + size <= kMaxKept) {
      try {
        free_[size].push_back(data);
        kept_ += size;
        return;
      } catch (const std::bad_alloc&) {
        // The list cannot grow: free the block.
      }
    }
    std::free(data);
  }

 private:
  void release_all() {
    const std::lock_guard lock(mutex_);
    for (auto& [size, blocks] : free_) {
      for (void* data : blocks) {
        std::free(data);
      }
      blocks.clear();
    }
    kept_ = 0;
  }

  std::mutex mutex_;
  std::unordered_map<std::size_t, std::vector<void*>> free_;
  std::size_t kept_ = 0;
};

// Never destroyed: tensors may outlive every static.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

bool is_small(std::size_t bytes) { return bytes < kMinPooled; }

}  // namespace

bool pooling() {
#if defined(MICA_ADDRESS_SANITIZER)
  return false;
#else
  static const bool on = [] {
    const char* value = std::getenv("MICA_POOL");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return on;
#endif
}

bool poisoning() {
  static const bool on = [] {
    const char* value = std::getenv("MICA_POISON");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return on;
}

void* allocate(Cpu, std::size_t bytes, void**) {
  AllocationFault::on_allocation(bytes);
  void* data = nullptr;
  if (bytes <= PTRDIFF_MAX / 2) {
    data = !pooling() ? system_allocate(bytes) : is_small(bytes) ? small_allocate(bytes) : pool().allocate(bytes);
  }
  if (data == nullptr) {
    throw OutOfMemory(fmt::format("out of memory: asked for {} bytes on the cpu", bytes));
  }
  if (poisoning()) {
    std::memset(data, 0xFF, bytes);
  }
  return data;
}

void deallocate(Cpu, void* data, std::size_t bytes, void*) noexcept {
  AllocationFault::on_deallocation();
  if (!pooling()) {
    std::free(data);
  } else if (is_small(bytes)) {
    small_deallocate(data);
  } else {
    pool().deallocate(data, bytes);
  }
}

void write(Cpu, void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace mica::memory
