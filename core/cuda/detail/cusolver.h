#pragma once

#include <cusolverDn.h>

#include <source_location>

namespace mica::cuda {

/// Throws CudaError unless `status` is success. `what` is the call: cuda::check(cusolverDnFoo(…), "cusolverDnFoo").
void check(cusolverStatus_t status, const char* what, std::source_location where = std::source_location::current());

/// This thread's cuSOLVER handle for the current device, set to the current stream. Its algorithms give the same bits
/// each time.
cusolverDnHandle_t cusolver_handle();

}  // namespace mica::cuda
