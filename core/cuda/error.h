#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

#include <mica/core/check.h>

namespace mica::cuda {

/// A call into CUDA failed. The message has the call and its place in the source.
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

/// To follow every kernel launch: throws if it could not be launched. With MICA_CUDA_SYNC=1 in the environment it
/// also waits for the kernel, so that an error inside it is reported where it was launched.
void check_launch(const char* kernel, std::source_location where = std::source_location::current());

}  // namespace mica::cuda
