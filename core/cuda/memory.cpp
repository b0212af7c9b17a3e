#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include <mica/core/cuda/device.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/memory.h>

namespace mica::memory {

namespace {

// By default the driver's pool gives memory back at every synchronization; ours keeps it.
void keep_freed_memory() {
  static std::vector<std::once_flag> done(cuda::device_count());
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  std::call_once(done[device], [&] {
    cudaMemPool_t pool = nullptr;
    cuda::check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
    std::uint64_t all = UINT64_MAX;
    cuda::check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "cudaMemPoolSetAttribute");
  });
}

cudaError_t try_allocate(void** data, std::size_t bytes, cudaStream_t stream) {
  return pooling() ? cudaMallocAsync(data, bytes, stream) : cudaMalloc(data, bytes);
}

}  // namespace

void* allocate(Cuda, std::size_t bytes, void** stream) {
  const cudaStream_t current = cuda::current_stream();
  *stream = current;
  if (pooling()) {
    keep_freed_memory();
  }
  void* data = nullptr;
  cudaError_t status = try_allocate(&data, bytes, current);
  if (status == cudaErrorMemoryAllocation) {
    // Memory freed on other streams, or on the device but not yet run past, can be had after waiting.
    (void)cudaGetLastError();
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    status = try_allocate(&data, bytes, current);
  }
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    int device = 0;
    std::size_t free = 0;
    std::size_t total = 0;
    cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw OutOfMemory(fmt::format("out of memory: asked for {} bytes on cuda:{}, where {} of {} are free", bytes,
                                  device, free, total));
  }
  cuda::check(status, pooling() ? "cudaMallocAsync" : "cudaMalloc");
  if (poisoning()) {
    cuda::check(cudaMemsetAsync(data, 0xFF, bytes, current), "cudaMemsetAsync");
  }
  return data;
}

void deallocate(Cuda, void* data, std::size_t, void* stream) noexcept {
  // Nothing sensible can be done about a failure here; at program exit the driver may already be gone.
  (void)(pooling() ? cudaFreeAsync(data, static_cast<cudaStream_t>(stream)) : cudaFree(data));
}

void copy(Cuda, void* to, const void* from, std::size_t bytes) {
  const cudaStream_t stream = cuda::current_stream();
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  cudaPointerAttributes attributes{};
  cuda::check(cudaPointerGetAttributes(&attributes, to), "cudaPointerGetAttributes");
  if (attributes.type != cudaMemoryTypeDevice) {
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
}

}  // namespace mica::memory
