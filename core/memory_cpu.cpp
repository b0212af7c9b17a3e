#include <cstdint>
#include <cstdlib>

#include <mica/core/memory.h>

namespace mica::memory {

namespace {

// One cache line, and the widest vector register.
constexpr std::size_t kAlignment = 64;

}  // namespace

void* allocate(Cpu, std::size_t bytes, void**) {
  void* data = nullptr;
  if (bytes <= PTRDIFF_MAX - kAlignment) {
    data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  if (data == nullptr) {
    throw OutOfMemory(fmt::format("out of memory: asked for {} bytes on the cpu", bytes));
  }
  return data;
}

void deallocate(Cpu, void* data, void*) noexcept { std::free(data); }

}  // namespace mica::memory
