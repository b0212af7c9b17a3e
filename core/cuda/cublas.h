#pragma once

#include <cublas_v2.h>

#include <cstddef>
#include <source_location>

namespace mica::cuda {

/// Throws CudaError unless `status` is success. `what` is the call: cuda::check(cublasFoo(…), "cublasFoo").
void check(cublasStatus_t status, const char* what, std::source_location where = std::source_location::current());

/// The same for calls that launch kernels, which are also reported to this thread's LaunchObserver under that name.
void check_launch(cublasStatus_t status, const char* what,
                  std::source_location where = std::source_location::current());

/// This thread's cuBLAS handle for the current device and stream, made at the first call for the two. It keeps a
/// workspace of its own: what cuBLAS chooses for a shape then never depends on the memory that happens to be free, so
/// that results repeat bit by bit. float32 is multiplied without TF32 unless a call asks for it, and no partial sum is
/// kept in 16 bits.
cublasHandle_t cublas_handle();

/// The workspace of cublas_handle(), for calls of cuBLASLt on the current stream.
struct CublasWorkspace {
  void* data;
  std::size_t bytes;
};
CublasWorkspace cublas_workspace();

}  // namespace mica::cuda
