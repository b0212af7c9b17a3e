#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

#include <mica/core/check.h>

namespace mica::cuda {

/// A CUDA call failed. The message contains the call and its source location.
class CudaError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] void throw_error(cudaError_t status, const char* what, std::source_location where);

/// Throws CudaError unless `status` is success. `what` is the call: cuda::check(cudaFoo(…), "cudaFoo").
inline void check(cudaError_t status, const char* what, std::source_location where = std::source_location::current()) {
  if (status != cudaSuccess) [[unlikely]] {
    throw_error(status, what, where);
  }
}

/// Call it after every kernel launch: throws if the launch failed. With MICA_CUDA_SYNC=1 in the environment it also
/// waits for the kernel, so that an error inside it is reported at its launch.
void check_launch(const char* kernel, std::source_location where = std::source_location::current());

}  // namespace mica::cuda
