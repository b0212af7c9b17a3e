#pragma once

#include <cublas_v2.h>

#include <mica/ops/matmul/detail/matmul_kernels.h>

namespace mica::kernels {

// Products by cuBLASLt, whose kernels have fused epilogues.

/// Computes a matmul in one kernel, with bias and activation in its epilogue. Returns false and computes nothing if
/// there is no such kernel, or for a plain product.
bool matmul_in_one_kernel(const MatmulArgs& args);

/// Computes a MatmulActivationBackward in one kernel. Returns false and computes nothing if there is no such kernel.
bool matmul_activation_backward_in_one_kernel(const MatmulActivationBackward& args);

/// The cuBLAS type of a floating dtype.
constexpr cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::float64: return CUDA_R_64F;
    case DType::float16: return CUDA_R_16F;
    case DType::bfloat16: return CUDA_R_16BF;
    default: return CUDA_R_32F;
  }
}

/// The compute type of products of that dtype; for float32, it depends on float32_matmul_precision().
inline cublasComputeType_t compute_type(DType dtype) {
  if (dtype == DType::float32 && float32_matmul_precision() == MatmulPrecision::tf32) {
    return CUBLAS_COMPUTE_32F_FAST_TF32;
  }
  return dtype == DType::float64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
}

}  // namespace mica::kernels
