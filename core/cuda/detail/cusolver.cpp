#include <cuda_runtime_api.h>

#include <map>

#include <mica/core/cuda/detail/cusolver.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>

namespace mica::cuda {

namespace {

// For the current device. Never destroyed while the driver may be gone: at program exit, the driver frees it.
class SolverHandle {
 public:
  explicit SolverHandle(int device) : device_(device) { check(cusolverDnCreate(&handle_), "cusolverDnCreate"); }
  ~SolverHandle() {
    int previous = 0;
    if (cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(device_) == cudaSuccess) {
      (void)cusolverDnDestroy(handle_);
      (void)cudaSetDevice(previous);
    }
  }
  SolverHandle(const SolverHandle&) = delete;
  SolverHandle& operator=(const SolverHandle&) = delete;

  cusolverDnHandle_t get() const { return handle_; }

 private:
  int device_;
  cusolverDnHandle_t handle_ = nullptr;
};

const char* text_of(cusolverStatus_t status) {
  switch (status) {
    case CUSOLVER_STATUS_NOT_INITIALIZED: return "not initialized";
    case CUSOLVER_STATUS_ALLOC_FAILED: return "allocation failed";
    case CUSOLVER_STATUS_INVALID_VALUE: return "invalid value";
    case CUSOLVER_STATUS_ARCH_MISMATCH: return "the GPU is not supported";
    case CUSOLVER_STATUS_EXECUTION_FAILED: return "execution failed";
    case CUSOLVER_STATUS_INTERNAL_ERROR: return "internal error";
    case CUSOLVER_STATUS_NOT_SUPPORTED: return "not supported";
    default: return "error";
  }
}

}  // namespace

void check(cusolverStatus_t status, const char* what, std::source_location where) {
  if (status != CUSOLVER_STATUS_SUCCESS) [[unlikely]] {
    (void)cudaGetLastError();
    throw CudaError(fmt::format("cuda: {} failed: {} ({}) at {}:{}", what, text_of(status), static_cast<int>(status),
                                where.file_name(), where.line()));
  }
}

cusolverDnHandle_t cusolver_handle() {
  static thread_local std::map<int, SolverHandle> handles;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const SolverHandle& handle = handles.try_emplace(device, device).first->second;
  check(cusolverDnSetStream(handle.get(), current_stream()), "cusolverDnSetStream");
  return handle.get();
}

}  // namespace mica::cuda
