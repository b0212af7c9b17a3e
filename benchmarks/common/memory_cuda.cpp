#include <cuda_runtime_api.h>

#include "benchmarks/common/memory.h"
#include <mica/core/cuda/error.h>

namespace benchmarks {

namespace {

// Tensors are allocated from the device's default pool.
cudaMemPool_t pool() {
  int device = 0;
  mica::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cudaMemPool_t result = nullptr;
  mica::cuda::check(cudaDeviceGetDefaultMemPool(&result, device), "cudaDeviceGetDefaultMemPool");
  return result;
}

}  // namespace

void reset_peak_memory(mica::Cuda) {
  std::uint64_t zero = 0;  // the only value that the driver accepts
  mica::cuda::check(cudaMemPoolSetAttribute(pool(), cudaMemPoolAttrUsedMemHigh, &zero), "cudaMemPoolSetAttribute");
}

std::uint64_t peak_memory(mica::Cuda) {
  std::uint64_t bytes = 0;
  mica::cuda::check(cudaMemPoolGetAttribute(pool(), cudaMemPoolAttrUsedMemHigh, &bytes), "cudaMemPoolGetAttribute");
  return bytes;
}

}  // namespace benchmarks
