// Writes small host memory to the device as a kernel's argument, which the launch copies:
//
//     host bytes ──> argument, up to 32 KB ──> write_kernel ──> device memory
//
// The host does not wait, as it would for cudaMemcpyAsync from pageable memory. There are variants for three sizes of
// arguments, since a launch copies all of it.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/memory.h>

namespace mica::memory {

namespace {

constexpr std::size_t kPack = 16;  // bytes

// Kernels take up to 4 KB of arguments on every chip and driver, nearly 32 KB from CUDA 12.1 on.
#if CUDART_VERSION >= 12010
constexpr std::size_t kMax = 31'968;
#else
constexpr std::size_t kMax = 3'984;
#endif

template <std::size_t kBytes>
struct Bytes {
  alignas(kPack) std::byte data[kBytes];
};

template <std::size_t kBytes>
__global__ void write_kernel(const __grid_constant__ Bytes<kBytes> from, std::byte* to, int bytes) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * static_cast<int>(kPack);
  if (i + static_cast<int>(kPack) <= bytes && reinterpret_cast<std::uintptr_t>(to) % kPack == 0) {
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from.data + i);
  } else {
    for (int k = i; k < min(i + static_cast<int>(kPack), bytes); ++k) {
      to[k] = from.data[k];
    }
  }
}

template <std::size_t kBytes>
void write_part(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr unsigned kThreads = 64;
  Bytes<kBytes> arguments;
  std::memcpy(arguments.data, from, bytes);
  const auto packs = static_cast<unsigned>((bytes + kPack - 1) / kPack);
  write_kernel<kBytes><<<(packs + kThreads - 1) / kThreads, kThreads, 0, cuda::current_stream()>>>(
      arguments, to, static_cast<int>(bytes));
  cuda::check_launch("write_kernel");
}

}  // namespace

void write(Cuda, void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const std::size_t part = std::min(bytes, kMax);
    if (part <= 512) {
      write_part<512>(target, source, part);
    } else if (part <= kMax / 3) {
      write_part<kMax / 3 / kPack * kPack>(target, source, part);
    } else {
      write_part<kMax>(target, source, part);
    }
    target += part;
    source += part;
    bytes -= part;
  }
}

}  // namespace mica::memory
