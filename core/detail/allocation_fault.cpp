#include <mica/core/check.h>
#include <mica/core/detail/allocation_fault.h>

namespace mica::memory {

AllocationFault::AllocationFault() {
  AllocationFault* none = nullptr;
  check(current_.compare_exchange_strong(none, this), "AllocationFault: another one is active");
}

AllocationFault::~AllocationFault() { current_.store(nullptr); }

void AllocationFault::count_allocation(std::size_t bytes) {
  AllocationFault& fault = *current_.load(std::memory_order_relaxed);
  if (fault.allocations_.fetch_add(1, std::memory_order_relaxed) == fault.failing_) {
    throw OutOfMemory(fmt::format("out of memory: asked for {} bytes; failure injected by a test", bytes));
  }
  fault.outstanding_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace mica::memory
