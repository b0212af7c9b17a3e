#pragma once

#include <cuda_runtime_api.h>

namespace mica::cuda {

/// The stream that this thread's work goes to, on its current device. The default stream unless a StreamGuard says
/// else.
cudaStream_t current_stream();

/// Sends this thread's work to `stream` until the end of scope.
class StreamGuard {
 public:
  explicit StreamGuard(cudaStream_t stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  cudaStream_t previous_;
};

}  // namespace mica::cuda
