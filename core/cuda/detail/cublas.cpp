#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <utility>

#include <mica/core/cuda/detail/arena.h>
#include <mica/core/cuda/detail/cublas.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/memory_stats.h>
#include <mica/core/storage.h>

namespace mica::cuda {

namespace {

// cuBLAS's recommendation: its kernels for Hopper and later split sums further.
constexpr std::size_t kWorkspaceHopper = std::size_t{32} << 20;
constexpr std::size_t kWorkspace = std::size_t{4} << 20;

std::size_t workspace_bytes(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major >= 9 ? kWorkspaceHopper : kWorkspace;
}

/// Memory for cuBLAS, counted as MemoryStats::workspace.
class Workspace {
 public:
  Workspace(std::size_t bytes, Device device) : device_(device), storage_(bytes, device) {
    detail::count_workspace(device_, static_cast<std::ptrdiff_t>(bytes));
  }
  ~Workspace() { detail::count_workspace(device_, -static_cast<std::ptrdiff_t>(storage_.bytes())); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return storage_.data(); }
  std::size_t bytes() const { return storage_.bytes(); }

 private:
  Device device_;
  Storage storage_;
};

// For the current device. The stream may be destroyed before the handle, so memory is not freed in stream order.
class Handle {
 public:
  Handle(int device, cudaStream_t stream) : device_(device) {
    const std::size_t bytes = workspace_bytes(device);
    {
      const StreamGuard guard(nullptr);
      workspace_ = std::make_unique<Workspace>(bytes, Device::cuda(device));
    }
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    check(cublasCreate(&handle_), "cublasCreate");
    try {
      // The order matters: a new stream resets the workspace.
      check(cublasSetStream(handle_, stream), "cublasSetStream");
      check(cublasSetWorkspace(handle_, workspace_->data(), bytes), "cublasSetWorkspace");
      const auto math =
          static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
      check(cublasSetMathMode(handle_, math), "cublasSetMathMode");
    } catch (...) {
      (void)cublasDestroy(handle_);
      throw;
    }
  }

  ~Handle() {
    // Waits for the kernels that use the workspace. At program exit the driver may already be unloaded: ignore errors.
    int previous = 0;
    const bool alive = cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(device_) == cudaSuccess;
    if (!alive || cudaDeviceSynchronize() != cudaSuccess) {
      (void)workspace_.release();
      return;
    }
    (void)cublasDestroy(handle_);
    workspace_.reset();
    (void)cudaSetDevice(previous);
  }

  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  /// Each captured graph has its own workspace in its arena, since two graphs may be replayed concurrently.
  void use_workspace_of(const Arena& arena) {
    if (arena_ != arena.id()) {
      auto fresh = std::make_unique<Workspace>(workspace_->bytes(), Device::cuda(device_));
      check(cublasSetWorkspace(handle_, fresh->data(), fresh->bytes()), "cublasSetWorkspace");
      workspace_ = std::move(fresh);
      arena_ = arena.id();
    }
  }

  cublasHandle_t get() const { return handle_; }
  CublasWorkspace workspace() const { return {workspace_->data(), workspace_->bytes()}; }

 private:
  int device_;
  std::unique_ptr<Workspace> workspace_;
  std::uint64_t arena_ = 0;  // the arena that holds the workspace
  cublasHandle_t handle_ = nullptr;
};

const Handle& current_handle() {
  // A thread's streams run concurrently, so each needs its own workspace and therefore its own handle.
  static thread_local std::map<std::pair<int, cudaStream_t>, Handle> handles;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::pair key(device, current_stream());
  auto found = handles.find(key);
  if (found == handles.end()) {
    found = handles.try_emplace(key, device, key.second).first;
  }
  if (const Arena* const arena = current_arena(); arena != nullptr) {
    found->second.use_workspace_of(*arena);
  }
  return found->second;
}

}  // namespace

void check(cublasStatus_t status, const char* what, std::source_location where) {
  if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]] {
    (void)cudaGetLastError();
    throw CudaError(fmt::format("cuda: {} failed: {} ({}) at {}:{}", what, cublasGetStatusName(status),
                                cublasGetStatusString(status), where.file_name(), where.line()));
  }
}

void check_launch(cublasStatus_t status, const char* what, std::source_location where) {
  check(status, what, where);
  LaunchObserver::notify(what);
}

cublasHandle_t cublas_handle() { return current_handle().get(); }
CublasWorkspace cublas_workspace() { return current_handle().workspace(); }

}  // namespace mica::cuda
