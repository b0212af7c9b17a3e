#include <cuda_runtime_api.h>

#include <algorithm>

#include <mica/core/capture.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/async_copy_kernels.h>
#include <mica/core/detail/memory.h>

namespace mica::memory {

namespace {

std::shared_ptr<void> make_event(unsigned flags) {
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | flags), "cudaEventCreateWithFlags");
  return {event, [](void* handle) { (void)cudaEventDestroy(static_cast<cudaEvent_t>(handle)); }};
}

}  // namespace

std::shared_ptr<std::byte> allocate_pinned(Cuda, std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaHostAlloc(&data, std::max<std::size_t>(bytes, 1), cudaHostAllocDefault);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw OutOfMemory(fmt::format("out of memory: asked for {} bytes of page-locked host memory", bytes));
  }
  cuda::check(status, "cudaHostAlloc");
  return {static_cast<std::byte*>(data), [](std::byte* memory) { (void)cudaFreeHost(memory); }};
}

std::shared_ptr<void> make_copy_stream(Cuda) {
  // Not ordered with the default stream, unlike a plain stream.
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return {stream, [](void* handle) { (void)cudaStreamDestroy(static_cast<cudaStream_t>(handle)); }};
}

std::shared_ptr<void> start_copies(Cuda, void* stream, const std::vector<Copy>& copies) {
  check_not_capturing("CopyStream");
  auto* const queue = static_cast<cudaStream_t>(stream);
  const std::shared_ptr<void> before = make_event(0);
  cuda::check(cudaEventRecord(static_cast<cudaEvent_t>(before.get()), cuda::current_stream()), "cudaEventRecord");
  cuda::check(cudaStreamWaitEvent(queue, static_cast<cudaEvent_t>(before.get()), 0), "cudaStreamWaitEvent");
  for (const Copy& copy : copies) {
    cuda::check(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, queue), "cudaMemcpyAsync");
  }
  // A thread that waits for it sleeps: it must not take a core from the training.
  std::shared_ptr<void> after = make_event(cudaEventBlockingSync);
  cuda::check(cudaEventRecord(static_cast<cudaEvent_t>(after.get()), queue), "cudaEventRecord");
  return after;
}

void wait_for_event(Cuda, void* event) {
  cuda::check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
  check_copy();
}

void order_after_event(Cuda, void* event) {
  cuda::check(cudaStreamWaitEvent(cuda::current_stream(), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
}

}  // namespace mica::memory
