#pragma once

#include <cublas_v2.h>

#include <cstddef>
#include <source_location>

namespace mica::cuda {

/// Throws CudaError unless `status` is success. `what` is the call: cuda::check(cublasFoo(…), "cublasFoo").
void check(cublasStatus_t status, const char* what, std::source_location where = std::source_location::current());

/// Like check(), for calls that launch kernels: also reports the launch to this thread's LaunchObserver, as `what`.
void check_launch(cublasStatus_t status, const char* what,
                  std::source_location where = std::source_location::current());

/// This thread's cuBLAS handle for the current device and stream, created at the first call. It has a workspace of its
/// own, so that cuBLAS's choice for a shape never depends on the amount of free memory, and results are bit-identical
/// from run to run. float32 products use TF32 only if a call requests it, and partial sums are not rounded to 16 bits.
cublasHandle_t cublas_handle();

/// The workspace of cublas_handle(), for calls of cuBLASLt on the current stream.
struct CublasWorkspace {
  void* data;
  std::size_t bytes;
};
CublasWorkspace cublas_workspace();

}  // namespace mica::cuda
