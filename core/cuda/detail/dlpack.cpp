#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/detail/dlpack_stream.h>

namespace mica::dlpack {

// DLPack's numbers 1 and 2 are also the values of cudaStreamLegacy and cudaStreamPerThread.
void make_wait(Cuda, std::intptr_t stream) {
  if (stream == -1) {
    return;
  }
  mica::check(stream > 0, "dlpack_wait: expected a stream's number or -1, got {}", stream);
  auto* const receiver = reinterpret_cast<cudaStream_t>(stream);  // NOLINT(performance-no-int-to-ptr)
  cudaStream_t own = cuda::current_stream();
  own = own == nullptr ? cudaStreamLegacy : own;
  if (receiver == own) {
    return;
  }
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const cudaError_t recorded = cudaEventRecord(event, own);
  const cudaError_t waits = recorded == cudaSuccess ? cudaStreamWaitEvent(receiver, event, 0) : recorded;
  cuda::check(cudaEventDestroy(event), "cudaEventDestroy");
  cuda::check(waits, "cudaStreamWaitEvent");
}

}  // namespace mica::dlpack
