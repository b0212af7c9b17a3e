#pragma once

// Memory that runs out on purpose, for tests of what happens then.

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mica::memory {

/// While it lives, counts the allocations of tensors' memory on all threads and devices, and can make one of them throw
/// OutOfMemory. Only one at a time. To make every allocation of a piece of work fail once:
///
///     memory::AllocationFault fault;
///     for (std::int64_t i = 0; i == 0 || fault.happened(); ++i) {
///       fault.fail_after(i);
///       try { work(); } catch (const OutOfMemory&) {}
///     }
class AllocationFault {
 public:
  AllocationFault();
  ~AllocationFault();
  AllocationFault(const AllocationFault&) = delete;
  AllocationFault& operator=(const AllocationFault&) = delete;

  /// Lets `count` more allocations succeed and the one after them fail. One after that succeeds again.
  void fail_after(std::int64_t count) { failing_ = allocations() + count; }
  /// Whether the allocation that was to fail last was reached.
  bool happened() const { return failing_ >= 0 && allocations() > failing_; }

  /// Allocations so far, with those that failed.
  std::int64_t allocations() const { return allocations_.load(std::memory_order_relaxed); }
  /// Blocks handed out that have not come back. One from before counts −1 when it comes back.
  std::int64_t outstanding() const { return outstanding_.load(std::memory_order_relaxed); }

  /// memory::allocate() and memory::deallocate() call these. They cost one branch when there is no fault.
  static void on_allocation(std::size_t bytes) {
    if (current_.load(std::memory_order_relaxed) != nullptr) [[unlikely]] {
      count_allocation(bytes);
    }
  }
  static void on_deallocation() noexcept {
    if (AllocationFault* const fault = current_.load(std::memory_order_relaxed); fault != nullptr) [[unlikely]] {
      fault->outstanding_.fetch_sub(1, std::memory_order_relaxed);
    }
  }

 private:
  static void count_allocation(std::size_t bytes);

  static inline std::atomic<AllocationFault*> current_{nullptr};
  std::int64_t failing_ = -1;
  std::atomic<std::int64_t> allocations_{0};
  std::atomic<std::int64_t> outstanding_{0};
};

}  // namespace mica::memory
