#pragma once

#include <cuda_runtime_api.h>

#include <mica/core/detail/nesting.h>

namespace mica::cuda {

/// This thread's stream on its current device: the default stream, unless a StreamGuard has set another one.
cudaStream_t current_stream();

/// Sends this thread's work to `stream` until the end of scope.
class StreamGuard {
 public:
  explicit StreamGuard(cudaStream_t stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  mica::detail::Nested<StreamGuard> nested_{"cuda::StreamGuard"};
  cudaStream_t previous_;
};

}  // namespace mica::cuda
