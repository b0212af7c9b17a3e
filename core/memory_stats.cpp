#include <algorithm>
#include <array>
#include <atomic>

#include <mica/core/memory_stats.h>

namespace mica {

namespace {

// One cache line each, which avoids false sharing between threads on different devices.
struct alignas(64) Counters {
  std::atomic<std::size_t> allocated{0};
  std::atomic<std::size_t> peak{0};
  std::atomic<std::size_t> workspace{0};
};

constinit std::array<Counters, 65> all;  // the CPU, then up to 64 GPUs

Counters& counters(Device device) { return all[device.is_cpu() ? 0 : std::min<std::size_t>(device.index, 63) + 1]; }

void raise_peak(Counters& of, std::size_t allocated) {
  std::size_t peak = of.peak.load(std::memory_order_relaxed);
  while (peak < allocated && !of.peak.compare_exchange_weak(peak, allocated, std::memory_order_relaxed)) {
  }
}

}  // namespace

MemoryStats memory_stats(Device device) {
  const Counters& of = counters(device);
  const std::size_t allocated = of.allocated.load(std::memory_order_relaxed);
  return {.allocated = allocated,
          .peak = std::max(allocated, of.peak.load(std::memory_order_relaxed)),
          .workspace = of.workspace.load(std::memory_order_relaxed)};
}

void reset_peak_memory(Device device) {
  Counters& of = counters(device);
  of.peak.store(of.allocated.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

namespace detail {

void count_allocated(Device device, std::size_t bytes) {
  Counters& of = counters(device);
  raise_peak(of, of.allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

void count_freed(Device device, std::size_t bytes) noexcept {
  counters(device).allocated.fetch_sub(bytes, std::memory_order_relaxed);
}

void count_workspace(Device device, std::ptrdiff_t bytes) noexcept {
  counters(device).workspace.fetch_add(static_cast<std::size_t>(bytes), std::memory_order_relaxed);
}

}  // namespace detail

}  // namespace mica
