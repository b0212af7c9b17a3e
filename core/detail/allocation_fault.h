#pragma once

// Injects allocation failures, for tests.

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mica::memory {

/// During its lifetime, counts the allocations of tensor memory on all threads and devices, and can make one of them
/// throw OutOfMemory. Only one may exist at a time. To make every allocation of a piece of work fail once:
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

  /// Makes the allocation after the next `count` fail. Later ones succeed again.
  void fail_after(std::int64_t count) { failing_ = allocations() + count; }
  /// Whether the allocation chosen by the last fail_after() was reached.
  bool happened() const { return failing_ >= 0 && allocations() > failing_; }

  /// Allocations so far, including failed ones.
  std::int64_t allocations() const { return allocations_.load(std::memory_order_relaxed); }
  /// Blocks allocated and not yet freed. Freeing an older block counts −1.
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
